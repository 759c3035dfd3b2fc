"""What a quantized bundle answers on the CPU that this process sees. Imports no torch."""

import json
import sys
from contextlib import closing
from typing import Any

import numpy as np

from fatdeploy.bundle import read_bundle
from fatdeploy.errors import BackendUnavailable
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.opening import opened_engine
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.runtimes.proof.gate import Material, material_logits, read_material


def answers(path: str, rows: int) -> dict[str, Any]:
    """Return the choices after the reference's tokens and the targets by itself, or why the bundle is refused here."""
    bundle = read_bundle(path)
    try:
        engine = opened_engine(bundle, threads=1)
    except BackendUnavailable as error:
        return {"refusal": str(error)}
    material = read_material(bundle)
    chosen = material.rows(slice(0, min(rows, len(material.lengths))))
    with closing(engine):
        return {"choices": _choices(engine, chosen), "targets": _targets(engine, chosen), **_expected(chosen)}


def _choices(engine: Engine[Any], material: Material) -> list[list[int]]:
    return [
        row[: int(length)].tolist()
        for batch in material.batches()
        for row, length in zip(material_logits(engine, batch).argmax(-1), batch.lengths, strict=True)
    ]


def _targets(engine: Engine[Any], material: Material) -> list[list[int]]:
    sources = [ids[real] for ids, real in zip(material.source, material.mask, strict=True)]
    parallel = engine.spec.decoding == "parallel"
    options = DecodeOptions(
        max_new_tokens=None if parallel else material.tokens.shape[1], suppress_tokens=engine.spec.silent_ids
    )
    return [np.asarray(hypothesis.tokens).tolist() for hypothesis in decode(engine, sources, options)]


def _expected(material: Material) -> dict[str, Any]:
    pairs = zip(material.tokens, material.lengths, strict=True)
    return {"expected": [row[: int(length)].tolist() for row, length in pairs]}


if __name__ == "__main__":
    print(json.dumps(answers(sys.argv[1], int(sys.argv[2]))))
