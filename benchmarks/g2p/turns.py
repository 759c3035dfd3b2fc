"""One turn of ``g2p``: a bundle pronounces every word of a file in batches of one size; prints JSON."""

import json
import sys
import time
from pathlib import Path

import fatdeploy
from fatdeploy import DecodeOptions


def main() -> None:
    """Pronounce the words, so many times; print what was said and the seconds of each time."""
    asked = json.loads(sys.argv[1])
    words = Path(asked["words"]).read_text().split()
    options = DecodeOptions(num_beams=asked["beams"])
    seconds, said = [], []
    with fatdeploy.load(asked["bundle"], threads=asked["threads"]) as model:
        spec = model.spec
        # A batch of one is one call a word, as an application would make it; larger ones are cut by generate itself.
        each = 1 if asked["batch"] == 1 else len(words)
        budget = asked["batch"] * (max(map(len, words)) + spec.max_target) * asked["beams"]
        model.generate(words[:50], options)
        for _ in range(asked["repetitions"]):
            started = time.perf_counter()
            found = [
                one
                for start in range(0, len(words), each)
                for one in model.generate(words[start : start + each], options, batch_tokens=budget)
            ]
            seconds.append(time.perf_counter() - started)
            said = [one.text for one in found]
    print(json.dumps({"seconds": seconds, "said": said}))


if __name__ == "__main__":
    main()
