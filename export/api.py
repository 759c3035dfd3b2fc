"""``fatdeploy.export_model``: the export command as a Python call. torch is imported when it is called."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fatdeploy.errors import BackendUnavailable, ConfigError
from fatdeploy.exporter import need_export_packages
from fatdeploy.targets import DEFAULT_TARGET, TARGETS, Precision, Target, either, engine_targets

if TYPE_CHECKING:
    # Not at run time: `import fatdeploy` and the help need neither torch nor numpy.
    from torch import nn

    from fatdeploy.bundle import Bundle
    from fatdeploy.export.models.exportable import Choices
    from fatdeploy.export.pipeline import Finish
    from fatdeploy.export.quantize.request import QuantizeRequest
    from fatdeploy.runtimes.engines.trt.build.build import BuildRequest
    from fatdeploy.spec import ModelSpec

log = logging.getLogger("fatdeploy")


def export_model(
    source: "str | nn.Module",
    out: str | Path,
    *,
    target: Target = DEFAULT_TARGET,
    precision: "Precision | QuantizeRequest" = "fp32",
    choices: "Choices | None" = None,
    licence: str | None = None,
    tokenizer: str | Path | None = None,
    convert_tokenizer: bool = False,
    calibration: str | Path | None = None,
    probes: str | Path | None = None,
    shortlist_from: Sequence[str | Path] = (),
    engines: "BuildRequest | bool" = True,
    force: bool = False,
    progress: Callable[[str], None] = log.info,
) -> "Bundle":
    """Turn a model into a bundle in the folder ``out``, prove it right, and return it.

    ``source`` is what ``fatdeploy export`` takes (a Hugging Face folder, a checkpoint's folder, a preset,
    ``package.module:factory``), or a model itself. ``precision`` is a name, or a ``QuantizeRequest`` with everything
    that can be chosen for integers. ``choices`` are limits and outputs of the contract. ``tokenizer`` is a
    tokenizer.json; ``convert_tokenizer`` makes one of sentencepiece models and compares both on the texts of
    ``calibration``. ``calibration`` and ``probes`` are the files that a quantization of trained weights reads; each
    defaults to what ``source`` brings. ``shortlist_from`` are files of texts or pairs from which the bundle gets a
    shortlist (``fatdeploy.build_shortlist``). For TensorRT targets ``engines`` says how engines are built; False leaves
    that to the device (``fatdeploy build``). ``progress`` is called with the name of each stage. A failure leaves
    whatever ``out`` held before.
    """
    need_export_packages()
    from fatdeploy.export.models.exportable import exportable_model
    from fatdeploy.export.models.loading import Lengths, model_from_source, with_converted_tokenizer
    from fatdeploy.export.pipeline import Origin, write_bundle

    if target not in TARGETS:
        raise ConfigError(f"target must be one of {either(TARGETS)}, found {target!r}")
    if isinstance(source, str):
        lengths = None if choices is None else Lengths(choices.max_source, choices.max_target)
        model, origin = model_from_source(source, licence=licence, lengths=lengths)
    else:
        model, origin = source, Origin(name=type(source).__name__, licence=licence)
    origin = replace(
        origin,
        tokenizer=_path(tokenizer) or origin.tokenizer,
        calibration=_path(calibration) or origin.calibration,
        probes=_path(probes) or origin.probes,
    )
    if convert_tokenizer:
        origin = with_converted_tokenizer(origin)
    exportable = exportable_model(model, choices)
    return write_bundle(
        exportable,
        Path(out),
        origin=origin,
        target=target,
        precision=precision,
        finish=joined_stages(
            shortlist_stage(shortlist_from, progress), engine_stage(target, engines, exportable.spec, progress)
        ),
        force=force,
        stage=progress,
    )


def _path(name: str | Path | None) -> Path | None:
    return None if name is None else Path(name)


def shortlist_stage(files: Sequence[str | Path], progress: Callable[[str], None]) -> "Finish | None":
    """Return what adds a shortlist to a bundle; None without files. A file that cannot be read is refused here."""
    from fatdeploy.runtimes.shortlist.build import build_shortlist, count_lines

    n_lines = sum(count_lines(Path(file)) for file in files)

    def add(folder: Path) -> None:
        progress(f"building the shortlist from {n_lines} lines")
        build_shortlist(folder, files, spinning=False)

    return add if files else None


def joined_stages(*stages: "Finish | None") -> "Finish | None":
    """Return several stages as one; None if there are none."""
    present = [stage for stage in stages if stage is not None]

    def finish(folder: Path) -> None:
        for stage in present:
            stage(folder)

    return finish if present else None


def engine_stage(
    target: Target, engines: "BuildRequest | bool", spec: "ModelSpec", progress: Callable[[str], None]
) -> "Finish | None":
    """Return what turns graphs into a TensorRT bundle; None for other targets.

    A build that is impossible is refused here, before anything is traced.
    """
    from fatdeploy.runtimes.engines.trt.build.build import BuildRequest, finish_bundle, planned

    flavour = TARGETS[target].flavour
    if flavour is None:
        if engines is not True:
            raise ConfigError(f"no engines are built for {target}: say --target {either(engine_targets())}")
        return None
    if engines is False:
        return partial(finish_bundle, target=flavour, plan=None, stage=progress)
    request = BuildRequest(flavour=flavour) if engines is True else engines
    if request.flavour != flavour:
        raise ConfigError(f"engines for {target} are built by {flavour}, found a request for {request.flavour}")
    try:
        plan = planned(request, spec)
    except BackendUnavailable as error:
        raise BackendUnavailable(
            f"{error}. To write the graphs alone, and build their engines on the device, pass --no-build"
        ) from error
    return partial(finish_bundle, target=flavour, plan=plan, stage=progress)
