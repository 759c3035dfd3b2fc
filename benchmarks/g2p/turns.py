"""One turn of ``g2p``: a bundle pronounces every word of a file in batches of one size; prints JSON."""

import json
import sys
import time
from pathlib import Path

import fatdeploy
from fatdeploy import DecodeOptions


def main() -> None:
    """Pronounce the words several times; print the phonemes and the seconds of each pass."""
    described = json.loads(sys.argv[1])
    words = Path(described["words"]).read_text().split()
    options = DecodeOptions(num_beams=described["beams"])
    seconds, phonemes = [], []
    with fatdeploy.load(described["bundle"], threads=described["threads"]) as model:
        spec = model.spec
        # A batch of one is one call per word, as in an application; generate itself cuts larger batches.
        words_per_call = 1 if described["batch"] == 1 else len(words)
        budget = described["batch"] * (max(map(len, words)) + spec.max_target) * described["beams"]
        model.generate(words[:50], options)
        for _ in range(described["repetitions"]):
            started = time.perf_counter()
            hypotheses = [
                hypothesis
                for start in range(0, len(words), words_per_call)
                for hypothesis in model.generate(words[start : start + words_per_call], options, batch_tokens=budget)
            ]
            seconds.append(time.perf_counter() - started)
            phonemes = [hypothesis.text for hypothesis in hypotheses]
    print(json.dumps({"seconds": seconds, "said": phonemes}))


if __name__ == "__main__":
    main()
