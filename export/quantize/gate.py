"""The gate: a quantized bundle against the live reference, and which matrices cost it most."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fatdeploy.certificate import MetricChange, TokenAgreement
from fatdeploy.errors import BackendUnavailable, ConfigError, in_one_line
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.quantize.examples import Example
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.sources import padded
from fatdeploy.runtimes.engines.protocol import Engine, Floats
from fatdeploy.runtimes.evaluation.metrics import METRICS, OF_TEXT, need_sacrebleu
from fatdeploy.runtimes.proof.gate import BATCH, Material, material_logits, token_agreement
from fatdeploy.runtimes.proof.lockstep import margins_of
from fatdeploy.runtimes.text.tokenizer import PackageTokenizer, Tokenizer
from fatdeploy.spec import ModelSpec

# Steps of random weights that are judged: their targets have no end of their own. Trained ones are judged to the end.
RANDOM_STEPS = 64


@dataclass(frozen=True)
class Bar:
    """What a quantized bundle must reach: a share of the reference's tokens, and points of the metric at most lost."""

    agreement: float = 0.99
    points: float = 0.3


@dataclass(frozen=True)
class Judgement:
    """What the gate found. Errors of logits are relative to the reference's margin between its two best tokens."""

    agreement: TokenAgreement
    metric: MetricChange | None
    median_error: float
    steps_in_danger: float  # the share whose error is more than half of the margin, so that the token might change

    def passes(self, bar: Bar) -> bool:
        """Whether the bar is reached."""
        return self.agreement.share >= bar.agreement and (self.metric is None or self.metric.lost <= bar.points)

    def line(self) -> str:
        """Say it in one line."""
        metric = "" if self.metric is None else f"; {self.metric.line()}"
        return f"{self.agreement.line()}{metric}"


def metric_of(
    wanted: str | None, examples: Sequence[Example], tokenizer: Tokenizer | None, say: Callable[[str], None]
) -> str | None:
    """Return the metric that probes are judged by, None where they have no targets; what cannot be measured is refused.

    Unless one is wanted it is BLEU where tokens are parts of words, and otherwise the token error rate.
    """
    bare = sum(not one.references for one in examples)
    reasons = []
    if 0 < bare < len(examples):
        reasons.append(f"{bare} of {len(examples)} probes have no target: give each of --probes a target, or none")
    if wanted is not None and bare == len(examples):
        reasons.append(f"--metric {wanted} needs targets: give --probes a file with a source, TAB and target a line")
    if wanted in OF_TEXT and tokenizer is None:
        reasons.append(f"--metric {wanted} needs text, and the model has no tokenizer: say --metric token_error_rate")
    if reasons:
        raise ConfigError(in_one_line("the gate has no metric", reasons))
    if wanted in OF_TEXT:
        need_sacrebleu()
    if wanted is not None or bare:
        return wanted
    if not isinstance(tokenizer, PackageTokenizer):
        return "token_error_rate"
    try:
        need_sacrebleu()
    except BackendUnavailable:
        say("judging by token_error_rate: bleu needs sacrebleu (pip install 'fatdeploy[eval]')")
        return "token_error_rate"
    return "bleu"


class Gate:
    """The reference's targets and logits for some sources, which quantized engines are compared with."""

    def __init__(
        self,
        reference: EagerEngine,
        examples: Sequence[Example],
        tokenizer: Tokenizer | None,
        *,
        metric: str | None = None,
        most_steps: int | None = None,
    ) -> None:
        self._examples, self._tokenizer, self._metric, self._most = examples, tokenizer, metric, most_steps
        self.material = material_of(reference, [one.source for one in examples], most_steps)
        # Of steps that count alone: one long target would make all of its batch as long.
        self._logits = [material_logits(reference, batch)[batch.counts] for batch in self.material.batches()]

    def judged(self, engine: Engine[Any]) -> Judgement:
        """Return how close an engine comes to the reference."""
        ratios = np.concatenate(
            [
                np.abs(material_logits(engine, batch)[batch.counts] - logits).max(-1) / _margins(logits)
                for batch, logits in zip(self.material.batches(), self._logits, strict=True)
            ]
        )
        return Judgement(
            agreement=token_agreement(engine, self.material),
            metric=self._metric_change(engine),
            median_error=float(np.median(ratios)),
            steps_in_danger=float((ratios > 0.5).mean()),
        )

    def error_of(self, engine: Engine[Any]) -> float:
        """Return the mean square by which logits are off, as a share of the reference's own mean square."""
        lost = power = 0.0
        for batch, logits in zip(self.material.batches(), self._logits, strict=True):
            found = material_logits(engine, batch)[batch.counts]
            lost += float(np.square(found - logits, dtype=np.float64).sum())
            power += float(np.square(logits, dtype=np.float64).sum())
        return lost / power

    def _metric_change(self, engine: Engine[Any]) -> MetricChange | None:
        if self._metric is None:
            return None
        references = [one.references for one in self._examples]
        theirs = [self._text(row) for row in self.material.targets(engine.spec)]
        mine: list[str] = []
        for batch in self.material.batches():
            sources = [ids[real] for ids, real in zip(batch.source, batch.mask, strict=True)]
            mine += [self._text(one.tokens) for one in decode(engine, sources, _options(engine.spec, self._most))]
        metric = METRICS[self._metric]
        return MetricChange(self._metric, metric(theirs, references).value, metric(mine, references).value)

    def _text(self, tokens: Sequence[int]) -> str:
        """Return what a target is compared as; without a tokenizer files hold ids."""
        return " ".join(map(str, tokens)) if self._tokenizer is None else self._tokenizer.text(tokens)


def material_of(reference: EagerEngine, sources: Sequence[Any], most_steps: int | None) -> Material:
    """Return the reference's greedy targets of sources, each with its EOS if it came to it.

    Without ``most_steps`` they are as long as the model lets them be.
    """
    spec = reference.spec
    targets: list[list[int]] = []
    for start in range(0, len(sources), BATCH):
        for one in decode(reference, sources[start : start + BATCH], _options(spec, most_steps)):
            said = list(one.tokens)[::-1] if spec.target_order == "right_to_left" else list(one.tokens)
            # The length that a head has chosen is no token.
            ended = one.finish == "eos" and not spec.length_log_probs
            targets.append([*said, spec.eos_id] if ended else said)
    source, mask = padded(sources, spec)
    lengths = np.array([max(1, len(target)) for target in targets])
    tokens = np.full((len(targets), int(lengths.max())), spec.pad_id)
    for row, target in zip(tokens, targets, strict=True):
        row[: len(target)] = target or [spec.eos_id]
    return Material(source, mask, tokens, lengths)


def _options(spec: ModelSpec, most_steps: int | None) -> DecodeOptions:
    if spec.decoding == "parallel" or most_steps is None:
        return DecodeOptions()
    return DecodeOptions(max_new_tokens=min(most_steps, spec.max_target))


def _margins(logits: Floats) -> Floats:
    margins: Floats = np.maximum(margins_of(logits), np.finfo(np.float32).tiny)
    return margins


def fewest_kept(names: Sequence[str], passes: Callable[[int], bool]) -> int:
    """Return how many of the first names must be kept as they are for a test to pass: with one less it does not."""
    low, high = 0, len(names)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle + 1, high)
    return low
