"""Compare an imported model and its bundle with the original: logits of ``transformers``, and its ``generate``."""

import copy
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fatdeploy.certificate import GenerateAgreement, OriginalAgreement, OriginalRecord
from fatdeploy.errors import CheckpointError, ParityFailed
from fatdeploy.export.models.exportable import Exportable
from fatdeploy.export.proof.shared_settings import reads_padding, shared_settings
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.runtimes.proof.forced import decoder_inputs
from fatdeploy.runtimes.proof.lockstep import NOISE
from fatdeploy.runtimes.proof.probes import Probe
from fatdeploy.spec import Mask, ModelSpec, Tokens

PACKAGE = "transformers"
# Larger models are compared in float32: two of them in float64 would not fit into the memory of a small machine.
MOST_IN_DOUBLE = 200_000_000
# How far logits may be apart, relative to the largest.
LOGIT_BOUNDS = {"float64": 1e-6, "float32": NOISE}
SCORE_BOUND = 1e-4
# What ``generate`` is asked: it takes as long for a step as the bundle for twenty.
NEW_TOKENS, LONGEST = 32, 64
# Numbers of one comparison of logits: 64 MB in float64.
MOST_LOGITS = 2**23


class AllInDouble(TorchFunctionMode):
    """Keeps float64 numbers in float64: transformers rounds norms and softmaxes of T5 to float32 in any model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rounds = func is Tensor.float or (func is Tensor.to and torch.float32 in args)
        if rounds and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def is_installed() -> bool:
    """Return whether the original can be run here."""
    return importlib.util.find_spec(PACKAGE) is not None


@dataclass(frozen=True)
class Original:
    """The model of a Hugging Face folder as ``transformers`` runs it."""

    model: Any
    version: str

    @torch.inference_mode()
    def logits(self, source: Tensor, mask: Tensor, target_in: Tensor) -> Tensor:
        """Return the logits [B, T, V] after a whole target."""
        outputs = self.model(input_ids=source, attention_mask=mask.long(), decoder_input_ids=target_in)
        logits: Tensor = outputs.logits
        return logits

    @torch.inference_mode()
    def generated(self, source: Tokens, mask: Mask, limit: int) -> list[tuple[list[int], float | None]]:
        """Return each source's best target without its start token, and its score if beams give it one."""
        try:
            results = self.model.generate(
                torch.from_numpy(source),
                attention_mask=torch.from_numpy(mask).long(),
                return_dict_in_generate=True,
                output_scores=True,
                max_new_tokens=limit,
                use_cache=False,  # nothing remembered can be wrong: T5's fails if the decoder has more layers
            )
        except Exception as error:  # settings that it refuses make it raise anything
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise ParityFailed(
                f"{PACKAGE} {self.version} cannot generate with the folder's settings: {cause}"
            ) from error
        targets = results.sequences[:, 1:].tolist()
        scores = getattr(results, "sequences_scores", None)
        return list(zip(targets, [None] * len(targets) if scores is None else scores.tolist(), strict=True))


def opened_original(folder: Path) -> Original:
    """Return the model of a folder, in float32; nothing is downloaded."""
    import transformers

    version = importlib.metadata.version(PACKAGE)
    kind = transformers.AutoModelForSeq2SeqLM
    try:
        with _quiet():
            model = kind.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    except Exception as error:  # a folder that it cannot read makes it raise anything
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"{PACKAGE} {version} cannot read {folder}, so nothing can be compared with the original ({cause}): save "
            "the model again with save_pretrained"
        ) from error
    return Original(model.eval(), version)


def original_record(
    folder: Path, model: Exportable, engine: Engine[Any], probes: Sequence[Probe], options: DecodeOptions
) -> OriginalRecord:
    """Return what a comparison with the original showed, or why there was none; a miss is ParityFailed."""
    if not is_installed():
        return OriginalRecord(f"nothing: {PACKAGE} is not installed, so fatdeploy's own reading of the folder counts")
    if not isinstance(model.inner, ReferenceModel):
        raise ParityFailed(f"{folder} was not imported: only imported models have an original")
    agreement = compared_with_original(folder, model.inner, engine, probes, options)
    return OriginalRecord(f"{PACKAGE} {agreement.versions[PACKAGE]}", agreement)


def compared_with_original(
    folder: Path, model: ReferenceModel, engine: Engine[Any], probes: Sequence[Probe], options: DecodeOptions
) -> OriginalAgreement:
    """Compare logits of our reference, and targets of an fp32 engine, with the original's; a miss is ParityFailed.

    ``options`` are the folder's own settings. Samples cannot be compared: then greedy targets stand alone.
    """
    with _quiet():
        original = opened_original(folder)
        _complete_ids(original.model.generation_config, engine.spec)
        generated = []
        if not options.sample:
            shared, unshared = shared_settings(options, original.model.generation_config)
            name = "the folder's settings" + (f" but for {', '.join(unshared)}" if unshared else "")
            generated.append(_same_targets(original, engine, probes, name, shared))
        # Replaced, not passed: ``generate`` fills what a passed one leaves open with the model's own.
        original.model.generation_config = _plain_settings(original.model, engine.spec)
        greedy = DecodeOptions(suppress_tokens=engine.spec.silent_ids)
        generated.append(_same_targets(original, engine, probes, "greedy search", greedy))
        double = sum(parameter.numel() for parameter in model.parameters()) <= MOST_IN_DOUBLE
        difference, positions = _logit_difference(original, model, probes, double=double)
    return OriginalAgreement(
        versions={PACKAGE: original.version},
        dtype="float64" if double else "float32",
        positions=positions,
        largest_relative_difference=difference,
        generated=tuple(generated),
    )


def _logit_difference(
    original: Original, model: ReferenceModel, probes: Sequence[Probe], *, double: bool
) -> tuple[float, int]:
    """Return the largest difference of logits relative to the largest logit, and how many positions were compared."""
    if double:
        # The last use of the original: it need not be copied.
        original, model = Original(original.model.double(), original.version), copy.deepcopy(model).double()
    bound = LOGIT_BOUNDS["float64" if double else "float32"]
    largest, positions = 0.0, 0
    for index, probe in enumerate(probes):
        source, mask = torch.from_numpy(probe.source), torch.from_numpy(probe.mask)
        most = max(1, MOST_LOGITS // (len(source) * model.spec.vocab_size))
        target_in = torch.from_numpy(decoder_inputs(model.spec, probe.tokens)[:, :most])
        with torch.inference_mode(), AllInDouble() if double else nullcontext():
            ours, theirs = model(source, mask, target_in), original.logits(source, mask, target_in)
        difference = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))
        if not difference <= bound:
            raise ParityFailed(
                f"probe {index}: the logits of the imported model differ from those of {PACKAGE} {original.version} "
                f"by {difference:.1e} of the largest, more than {bound:.0e}: the import is wrong, please report it"
            )
        largest, positions = max(largest, difference), positions + target_in.numel()
    return largest, positions


def _same_targets(
    original: Original, engine: Engine[Any], probes: Sequence[Probe], name: str, options: DecodeOptions
) -> GenerateAgreement:
    """Compare an engine's targets with those of ``generate``; another target with another score is ParityFailed."""
    short = [probe for probe in probes if probe.source.shape[1] <= LONGEST]
    sources = [ids[real].tolist() for probe in short for ids, real in zip(probe.source, probe.mask, strict=True)]
    limit = min(max(NEW_TOKENS, options.min_new_tokens + 8), engine.spec.max_target)
    ours = decode(engine, sources, replace(options, max_new_tokens=limit))
    ties = 0
    batches = [(probe.source, probe.mask) for probe in short]
    if reads_padding(options):
        batches = [(np.array([source]), np.ones((1, len(source)), bool)) for source in sources]
    theirs = [result for source, mask in batches for result in original.generated(source, mask, limit)]
    for index, (hypothesis, (target, score)) in enumerate(zip(ours, theirs, strict=True)):
        if list(hypothesis.tokens) == _cut(target, engine.spec, options):
            continue
        if score is None or hypothesis.score is None or abs(hypothesis.score - score) > SCORE_BOUND:
            raise ParityFailed(_miss(index, name, hypothesis, target, score, original.version))
        ties += 1
    return GenerateAgreement(settings=name, targets=len(sources), ties=ties, num_beams=options.num_beams)


def _complete_ids(settings: Any, spec: ModelSpec) -> None:
    """Set the ids that a folder leaves to its family: ``generate`` does not know the defaults of a configuration."""
    if settings.decoder_start_token_id is None and settings.bos_token_id is None:
        settings.decoder_start_token_id = spec.bos_id
    if settings.eos_token_id is None:
        settings.eos_token_id = spec.eos_id
    if settings.pad_token_id is None:
        settings.pad_token_id = spec.pad_id


def _plain_settings(model: Any, spec: ModelSpec) -> Any:
    """Return settings of ``generate`` without any choice but the ids."""
    import transformers

    return transformers.GenerationConfig(
        pad_token_id=model.generation_config.pad_token_id,
        eos_token_id=spec.eos_id,
        decoder_start_token_id=spec.bos_id,
        suppress_tokens=list(spec.silent_ids) or None,
        num_beams=1,
        do_sample=False,
    )


def _cut(target: list[int], spec: ModelSpec, options: DecodeOptions) -> list[int]:
    """Return a target of ``generate`` up to its first EOS."""
    ends = set(options.eos_ids or (spec.eos_id,))
    end = next((place for place, token in enumerate(target) if token in ends), len(target))
    return target[:end]


def _miss(index: int, name: str, ours: Hypothesis, target: Sequence[int], score: float | None, version: str) -> str:
    places = np.flatnonzero([a != b for a, b in zip(ours.tokens, target, strict=False)])
    place = int(places[0]) if places.size else min(len(ours.tokens), len(target))
    mine = ours.tokens[place] if place < len(ours.tokens) else "the end"
    theirs = target[place] if place < len(target) else "the end"
    scores = "" if score is None or ours.score is None else f"; scores {ours.score:.5f} and {score:.5f}"
    return (
        f"source {index}, {name}, position {place}: {PACKAGE} {version} says {theirs}, the bundle {mine}{scores}: "
        "the import or its settings are wrong, please report it"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the package's advice and progress bars, but not its errors."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
