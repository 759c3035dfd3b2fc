"""Decoding with CTranslate2, greedy or with beams, as many steps as are asked for. Imports no torch."""

from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np

from fatdeploy.spec import Mask, Tokens

# CTranslate2 appends the unknown token to a vocabulary that lacks it: an id without a row in the output matrix, which
# no step can choose. As the end token it makes every decode as long as the limit, whatever the model says.
NEVER = "never"


class Translation:
    """A model behind arrays of ids, in float32 unless said; a batch is split over the workers."""

    def __init__(self, folder: Path, *, threads: int, workers: int = 1, compute_type: str = "float32") -> None:
        self.workers = workers
        self.translator = ctranslate2.Translator(
            str(folder), compute_type=compute_type, intra_threads=threads, inter_threads=workers
        )

    def sources(self, source: Tokens, mask: Mask) -> list[list[str]]:
        """Return right-padded sources as CTranslate2 wants them."""
        return [[str(token) for token in row[real]] for row, real in zip(source, mask, strict=True)]

    def results(
        self, sources: list[list[str]], target: int, beams: int = 1, hypotheses: int = 1, known: Any = None
    ) -> list[Any]:
        """Return what is decoded in exactly ``target`` steps, the best few of each source, ``known`` tokens first."""
        found: list[Any] = self.translator.translate_batch(
            sources,
            known,
            max_batch_size=-(-len(sources) // self.workers),
            beam_size=beams,
            num_hypotheses=hypotheses,
            max_input_length=0,
            max_decoding_length=target,
            min_decoding_length=0,
            end_token=NEVER,
        )
        return found

    def tokens(self, results: list[Any]) -> Tokens:
        """Return the ids of the best [B, T]."""
        return self.all_tokens(results)[:, 0]

    def all_tokens(self, results: list[Any]) -> Tokens:
        """Return the ids of all hypotheses [B, n, T], best first."""
        ids = [[[int(token) for token in tokens] for tokens in one.hypotheses] for one in results]
        return np.array(ids, np.int64)

    def following(self, sources: list[list[str]], tokens: Tokens) -> Tokens:
        """Return what is said after every part of known targets [B, T]: at each position after all that came before."""
        said = []
        for step in range(tokens.shape[1]):
            known = [[str(token) for token in row[:step]] for row in tokens]
            said.append(self.tokens(self.results(sources, step + 1, known=known if step else None))[:, step])
        return np.stack(said, 1)
