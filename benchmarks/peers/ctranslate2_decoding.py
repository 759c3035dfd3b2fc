"""Decoding with CTranslate2, greedy or with beams, for a fixed number of steps. Imports no torch."""

from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np

from fatdeploy.spec import Mask, Tokens

# CTranslate2 appends the unknown token to a vocabulary that lacks it: an id without a row in the output matrix, which
# no step can choose. As the end token it makes every decode as long as the limit.
NO_END = "never"


class Translation:
    """A model behind arrays of ids (default: float32); a batch is split over the workers."""

    def __init__(self, folder: Path, *, threads: int, workers: int = 1, compute_type: str = "float32") -> None:
        self.workers = workers
        self.translator = ctranslate2.Translator(
            str(folder), compute_type=compute_type, intra_threads=threads, inter_threads=workers
        )

    def sources(self, source: Tokens, mask: Mask) -> list[list[str]]:
        """Return right-padded sources as CTranslate2 expects them."""
        return [[str(token) for token in row[real]] for row, real in zip(source, mask, strict=True)]

    def results(
        self, sources: list[list[str]], target: int, beams: int = 1, hypotheses: int = 1, prefixes: Any = None
    ) -> list[Any]:
        """Return the best few hypotheses of each source, of exactly ``target`` steps that begin with the prefixes."""
        results: list[Any] = self.translator.translate_batch(
            sources,
            prefixes,
            max_batch_size=-(-len(sources) // self.workers),
            beam_size=beams,
            num_hypotheses=hypotheses,
            max_input_length=0,
            max_decoding_length=target,
            min_decoding_length=0,
            end_token=NO_END,
        )
        return results

    def tokens(self, results: list[Any]) -> Tokens:
        """Return the ids of the best [B, T]."""
        return self.all_tokens(results)[:, 0]

    def all_tokens(self, results: list[Any]) -> Tokens:
        """Return the ids of all hypotheses [B, n, T], best first."""
        ids = [[[int(token) for token in tokens] for tokens in result.hypotheses] for result in results]
        return np.array(ids, np.int64)

    def following(self, sources: list[list[str]], tokens: Tokens) -> Tokens:
        """Return the token that the model chooses after every prefix of known targets [B, T]."""
        choices = []
        for step in range(tokens.shape[1]):
            prefixes = [[str(token) for token in row[:step]] for row in tokens]
            results = self.results(sources, step + 1, prefixes=prefixes if step else None)
            choices.append(self.tokens(results)[:, step])
        return np.stack(choices, 1)
