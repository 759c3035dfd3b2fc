"""The gate: how close a quantized bundle comes to the reference, or to fp32 graphs that were proved to equal it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fatdeploy.certificate import MetricChange, TokenAgreement
from fatdeploy.errors import BackendUnavailable, ConfigError, in_one_line
from fatdeploy.export.quantize.examples import Example
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.sources import padded
from fatdeploy.runtimes.engines.protocol import Engine, Floats
from fatdeploy.runtimes.evaluation.metrics import METRICS, OF_TEXT, need_sacrebleu
from fatdeploy.runtimes.proof.gate import BATCH, Material, forced_fidelity, material_logits, token_agreement
from fatdeploy.runtimes.proof.lockstep import margins_of
from fatdeploy.runtimes.text.tokenizer import PackageTokenizer, Tokenizer
from fatdeploy.spec import ModelSpec

# Steps to judge with random weights, whose targets do not end by themselves. Trained ones are judged to the end.
RANDOM_STEPS = 64


# Steps whose logits are kept and compared: those of all would be gigabytes for a large vocabulary.
MOST_COMPARED = 512


@dataclass(frozen=True)
class Bar:
    """What a quantized bundle must reach: a share of the reference's tokens, or a limit on lost metric points.

    Without an ``agreement`` the metric decides where there is one, and otherwise the default of the precision.
    """

    agreement: float | None = None
    points: float = 0.3


@dataclass(frozen=True)
class Judgement:
    """The result of the gate. Errors of logits are relative to the reference's margin between its two best tokens."""

    agreement: TokenAgreement
    metric: MetricChange | None
    median_error: float
    steps_in_danger: float  # share with an error above half the margin, so that the token might change

    def passes(self, bar: Bar, least_agreement: float) -> bool:
        """Whether the bar is reached; ``least_agreement`` is the bar's, or the default where it has none."""
        if self.metric is None:
            return self.agreement.share >= least_agreement
        return self.metric.lost <= bar.points and self.agreement.share >= (bar.agreement or 0.0)

    def line(self) -> str:
        """Return the result in one line."""
        metric = "" if self.metric is None else f"; {self.metric.line()}"
        return f"{self.agreement.line()}{metric}"


def metric_of(
    wanted: str | None, examples: Sequence[Example], tokenizer: Tokenizer | None, say: Callable[[str], None]
) -> str | None:
    """Return the metric that probes are judged by, None if they have no targets; an impossible one is refused.

    The default is BLEU where tokens are parts of words, and otherwise the token error rate.
    """
    bare = sum(not example.references for example in examples)
    reasons = []
    if 0 < bare < len(examples):
        reasons.append(f"{bare} of {len(examples)} probes have no target: give each of --probes a target, or none")
    if wanted is not None and bare == len(examples):
        reasons.append(f"--metric {wanted} needs targets: give --probes a file with source, TAB, target per line")
    if wanted in OF_TEXT and tokenizer is None:
        reasons.append(f"--metric {wanted} needs text, and the model has no tokenizer: use --metric token_error_rate")
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
    """The reference's targets and logits for some sources, to compare quantized engines with."""

    def __init__(
        self,
        reference: Engine[Any],
        examples: Sequence[Example],
        tokenizer: Tokenizer | None,
        *,
        metric: str | None = None,
        most_steps: int | None = None,
    ) -> None:
        self._examples, self._tokenizer, self._metric, self._most = examples, tokenizer, metric, most_steps
        self.material = material_of(reference, [example.source for example in examples], most_steps)
        self._compared = self._first(MOST_COMPARED)
        # Only of steps that count: one long target would make its whole batch as long.
        self._logits = [material_logits(reference, batch)[batch.counts] for batch in self._compared.batches()]

    def judged(self, engine: Engine[Any]) -> Judgement:
        """Return how close an engine comes to the reference."""
        ratios = np.concatenate(
            [
                np.abs(material_logits(engine, batch)[batch.counts] - logits).max(-1) / _margins(logits)
                for batch, logits in zip(self._compared.batches(), self._logits, strict=True)
            ]
        )
        return Judgement(
            agreement=token_agreement(engine, self.material),
            metric=self._metric_change(engine),
            median_error=float(np.median(ratios)),
            steps_in_danger=float((ratios > 0.5).mean()),
        )

    def forced_share(self, engine: Engine[Any]) -> float:
        """Return the share of tokens that an engine chooses like the reference, each after the reference's own."""
        return forced_fidelity(engine, self.material).share

    def _first(self, most_steps: int) -> Material:
        """Return the first sources with so many steps in all, and at least one."""
        count = int((np.cumsum(self.material.lengths) <= most_steps).sum())
        return self.material.rows(slice(0, max(1, count)))

    def _metric_change(self, engine: Engine[Any]) -> MetricChange | None:
        if self._metric is None:
            return None
        references = [example.references for example in self._examples]
        theirs = [self._text(row) for row in self.material.targets(engine.spec)]
        mine: list[str] = []
        for batch in self.material.batches():
            sources = [ids[real] for ids, real in zip(batch.source, batch.mask, strict=True)]
            hypotheses = decode(engine, sources, _options(engine.spec, self._most))
            mine += [self._text(hypothesis.tokens) for hypothesis in hypotheses]
        metric = METRICS[self._metric]
        return MetricChange(self._metric, metric(theirs, references).value, metric(mine, references).value)

    def _text(self, tokens: Sequence[int]) -> str:
        """Return a target as it is compared; without a tokenizer files hold ids."""
        return " ".join(map(str, tokens)) if self._tokenizer is None else self._tokenizer.text(tokens)


def material_of(reference: Engine[Any], sources: Sequence[Any], most_steps: int | None) -> Material:
    """Return the reference's greedy targets of sources, each with EOS if it reached EOS.

    Without ``most_steps`` they may be as long as the model allows.
    """
    spec = reference.spec
    targets: list[list[int]] = []
    for start in range(0, len(sources), BATCH):
        for hypothesis in decode(reference, sources[start : start + BATCH], _options(spec, most_steps)):
            tokens = list(hypothesis.tokens)[:: -1 if spec.target_order == "right_to_left" else 1]
            # A length that a head chose is not a token.
            ended = hypothesis.finish == "eos" and not spec.length_log_probs
            targets.append([*tokens, spec.eos_id] if ended else tokens)
    source, mask = padded(sources, spec)
    lengths = np.array([max(1, len(target)) for target in targets])
    padded_targets = np.full((len(targets), int(lengths.max())), spec.pad_id)
    for row, target in zip(padded_targets, targets, strict=True):
        row[: len(target)] = target or [spec.eos_id]
    return Material(source, mask, padded_targets, lengths)


def _options(spec: ModelSpec, most_steps: int | None) -> DecodeOptions:
    unlimited = spec.decoding == "parallel" or most_steps is None
    most = None if unlimited or most_steps is None else min(most_steps, spec.max_target)
    return DecodeOptions(max_new_tokens=most, suppress_tokens=spec.silent_ids)


def _margins(logits: Floats) -> Floats:
    margins: Floats = np.maximum(margins_of(logits), np.finfo(np.float32).tiny)
    return margins
