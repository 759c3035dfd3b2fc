"""The options of ``fatdeploy export`` as what the pipeline takes; all that does not go together is told at once."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

from fatdeploy.errors import BackendUnavailable, ConfigError, in_one_line
from fatdeploy.export.models.exportable import Choices
from fatdeploy.export.pipeline import Origin
from fatdeploy.export.quantize.gate import Bar
from fatdeploy.export.quantize.quantizer import QuantizeRequest
from fatdeploy.export.quantize.recipe import MatrixPrecision
from fatdeploy.runtimes.commands.build import asked_engines, refuse_engine_options
from fatdeploy.runtimes.engines.trt.build.build import finish_bundle, planned
from fatdeploy.spec import ModelSpec
from fatdeploy.targets import TARGETS, FloatPrecision, Target, either, engine_targets


def choices_of(chosen: Mapping[str, Any]) -> Choices:
    """Return what is chosen of the model's contract."""
    names = ("max_source", "max_target", "top_k", "attention_layer")
    return Choices(**{name: chosen[name] for name in names})


def with_files(origin: Origin, chosen: Mapping[str, Any]) -> Origin:
    """Return where a model comes from with the files that were given in the place of its own."""
    given = {name: chosen[name] for name in ("calibration", "probes") if chosen[name] is not None}
    return replace(origin, **given)


def precision_of(chosen: Mapping[str, Any]) -> FloatPrecision | QuantizeRequest:
    """Return the precision that options ask for: of integers all that is chosen, floats have nothing to choose."""
    if chosen["precision"] in get_args(FloatPrecision):
        useless = {
            "--precision-of": bool(chosen["precision_of"]),
            "--calibration": chosen["calibration"] is not None,
            "--probes": chosen["probes"] is not None,
            "--recover": chosen["recover"],
            "--cpu": chosen["cpu"] != "any",
            "--min-agreement": chosen["min_agreement"] != Bar().agreement,
            "--max-loss": chosen["max_loss"] != Bar().points,
            "--metric": chosen["metric"] is not None,
            "--activations": chosen["activations"] != QuantizeRequest.activations,
            "--ranges": chosen["ranges"] != QuantizeRequest.ranges,
        }
        reasons = [f"{name} is for integers" for name, given in useless.items() if given]
        if reasons:
            told = f"nothing is quantized in {chosen['precision']} (say --precision int8 or int4)"
            raise ConfigError(in_one_line(told, reasons))
        return cast("FloatPrecision", chosen["precision"])
    return QuantizeRequest(
        precision=chosen["precision"],
        activations=chosen["activations"],
        ranges=chosen["ranges"],
        cpu=chosen["cpu"],
        of=precisions_from_text(chosen["precision_of"]),
        recover=chosen["recover"],
        bar=Bar(chosen["min_agreement"], chosen["max_loss"]),
        metric=chosen["metric"],
    )


def engines_of(
    target: Target, chosen: Mapping[str, Any], spec: ModelSpec, stage: Callable[[str], None]
) -> Callable[[Path], None] | None:
    """Return what makes a bundle of TensorRT out of one of graphs; None of other targets.

    What cannot be built is refused here, before anything is traced.
    """
    flavour = TARGETS[target].flavour
    if flavour is None:
        refuse_engine_options(chosen, f"no engines are built for {target} (say --target {either(engine_targets())})")
        if not chosen["build"]:
            raise ConfigError(f"--no-build is for engines, and none are built for {target}")
        return None
    if not chosen["build"]:
        refuse_engine_options(chosen, "no engines are built with --no-build (give it to fatdeploy build)")
        return partial(finish_bundle, target=flavour, plan=None, stage=stage)
    try:
        plan = planned(asked_engines(flavour, chosen), spec)
    except BackendUnavailable as error:
        raise BackendUnavailable(
            f"{error}. To write the graphs alone, and build their engines on the device, pass --no-build"
        ) from error
    return partial(finish_bundle, target=flavour, plan=plan, stage=stage)


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
