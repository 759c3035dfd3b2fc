"""The options of ``fatdeploy export`` as what the pipeline takes; all that does not go together is told at once."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast, get_args

from fatdeploy.bundle import Precision
from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.export.contract import Choices
from fatdeploy.export.gate import Bar
from fatdeploy.export.pipeline import Origin
from fatdeploy.export.precision import Asked, Integers
from fatdeploy.export.quantize import MatrixPrecision


def choices_of(chosen: Mapping[str, Any]) -> Choices:
    """Return what is chosen of the model's contract."""
    names = ("max_source", "max_target", "top_k", "attention_layer")
    return Choices(**{name: chosen[name] for name in names})


def with_files(origin: Origin, chosen: Mapping[str, Any]) -> Origin:
    """Return where a model comes from with the files that were given in the place of its own."""
    given = {name: chosen[name] for name in ("calibration", "probes") if chosen[name] is not None}
    return replace(origin, **given)


def floats_of(chosen: Mapping[str, Any]) -> Precision:
    """Return the precision of graphs of floats; integers are made of fp32."""
    precision: Precision = chosen["precision"]
    return "fp32" if precision in get_args(Integers) else precision


def asked_of(chosen: Mapping[str, Any]) -> Asked | None:
    """Return the quantization that options ask for; None of floats, which have nothing to choose."""
    if floats_of(chosen) == chosen["precision"]:
        useless = {
            "--precision-of": bool(chosen["precision_of"]),
            "--calibration": chosen["calibration"] is not None,
            "--probes": chosen["probes"] is not None,
            "--recover": chosen["recover"],
            "--cpu": chosen["cpu"] != "any",
            "--min-agreement": chosen["min_agreement"] != Bar().agreement,
            "--max-loss": chosen["max_loss"] != Bar().points,
        }
        reasons = [f"{name} is for integers" for name, given in useless.items() if given]
        if reasons:
            told = f"nothing is quantized in {chosen['precision']} (say --precision int8 or int4)"
            raise ConfigError(in_one_line(told, reasons))
        return None
    return Asked(
        precision=chosen["precision"],
        cpu=chosen["cpu"],
        of=precisions_from_text(chosen["precision_of"]),
        recover=chosen["recover"],
        bar=Bar(chosen["min_agreement"], chosen["max_loss"]),
    )


def precisions_from_text(given: tuple[str, ...]) -> dict[str, MatrixPrecision]:
    """Return the precisions that ``name=precision`` say."""
    known, found, wrong = get_args(MatrixPrecision), {}, []
    for text in given:
        name, equals, precision = text.rpartition("=")
        if not equals or not name or precision not in known:
            wrong.append(f"{text!r} must be NAME={'|'.join(known)}")
        found[name] = cast("MatrixPrecision", precision)
    if wrong:
        raise ConfigError(in_one_line("--precision-of refused", wrong))
    return found
