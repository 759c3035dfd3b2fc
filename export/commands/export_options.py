"""The options of ``fatdeploy export`` as arguments of ``export_model``; every conflict is reported at once."""

import logging
from collections.abc import Mapping
from typing import Any, cast, get_args

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.export.models.exportable import Choices
from fatdeploy.export.quantize.gate import Bar
from fatdeploy.export.quantize.recipe import MatrixPrecision
from fatdeploy.export.quantize.request import QuantizeRequest
from fatdeploy.runtimes.commands.build import build_request, refuse_engine_options
from fatdeploy.runtimes.engines.trt.build.build import BuildRequest
from fatdeploy.targets import TARGETS, FloatPrecision, Target, either, engine_targets

log = logging.getLogger("fatdeploy")


def choices_of(chosen: Mapping[str, Any]) -> Choices:
    """Return the choices for the model's contract."""
    names = ("max_source", "max_target", "top_k", "attention_layer")
    return Choices(**{name: chosen[name] for name in names})


def precision_of(chosen: Mapping[str, Any]) -> FloatPrecision | QuantizeRequest:
    """Return the precision with everything chosen for integers; options of integers are refused for floats."""
    if chosen["precision"] in get_args(FloatPrecision):
        useless = {
            "--precision-of": bool(chosen["precision_of"]),
            "--calibration": chosen["calibration"] is not None and chosen["tokenizer"] != "convert",
            "--probes": chosen["probes"] is not None,
            "--recover": chosen["recover"],
            "--for": chosen["purpose"] != QuantizeRequest.purpose,
            "--rows": chosen["rows"] is not None,
            "--cpu": chosen["cpu"] != "any",
            "--min-agreement": chosen["min_agreement"] is not None,
            "--max-loss": chosen["max_loss"] != Bar().points,
            "--metric": chosen["metric"] is not None,
            "--activations": chosen["activations"] != QuantizeRequest.activations,
            "--ranges": chosen["ranges"] != QuantizeRequest.ranges,
        }
        reasons = [f"{name} is for integers" for name, was_typed in useless.items() if was_typed]
        if reasons:
            subject = f"nothing is quantized in {chosen['precision']} (use --precision int8 or int4)"
            raise ConfigError(in_one_line(subject, reasons))
        return cast("FloatPrecision", chosen["precision"])
    if chosen["recover"]:
        log.warning("--recover has no effect any more, a plan always keeps what the gate needs: leave it out")
    return QuantizeRequest(
        precision=chosen["precision"],
        purpose=chosen["purpose"],
        rows=chosen["rows"],
        activations=chosen["activations"],
        ranges=chosen["ranges"],
        cpu=chosen["cpu"],
        of=precisions_from_text(chosen["precision_of"]),
        recover=chosen["recover"],
        bar=Bar(chosen["min_agreement"], chosen["max_loss"]),
        metric=chosen["metric"],
    )


def engines_of(target: Target, chosen: Mapping[str, Any]) -> BuildRequest | bool:
    """Return how engines are built, and False if they are not; options of engines are refused where none are."""
    flavour = TARGETS[target].flavour
    if flavour is None:
        refuse_engine_options(chosen, f"no engines are built for {target} (use --target {either(engine_targets())})")
        if not chosen["build"]:
            raise ConfigError(f"--no-build is for engines, and none are built for {target}")
        return True
    if not chosen["build"]:
        refuse_engine_options(chosen, "no engines are built with --no-build (give it to fatdeploy build)")
        return False
    return build_request(flavour, chosen)


def precisions_from_text(texts: tuple[str, ...]) -> dict[str, MatrixPrecision]:
    """Return the precision of each name from texts such as ``name=precision``."""
    names = get_args(MatrixPrecision)
    precisions, reasons = {}, []
    for text in texts:
        name, equals, precision = text.rpartition("=")
        if not equals or not name or precision not in names:
            reasons.append(f"{text!r} must be NAME={'|'.join(names)}")
        precisions[name] = cast("MatrixPrecision", precision)
    if reasons:
        raise ConfigError(in_one_line("--precision-of refused", reasons))
    return precisions
