"""Pronounce words with the neural model of the g2p-en package, word by word; prints JSON.

Runs in an environment with that package, which would download a dictionary. An empty one replaces it, so that the model
pronounces every word.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


class EmptyDictionary:
    """A dictionary without words."""

    def dict(self) -> dict[str, Any]:
        """Return no entries."""
        return {}


def pronouncer() -> Any:
    """Return the package's model."""
    import nltk

    nltk.data.find = lambda *_, **__: True
    from g2p_en import g2p

    g2p.cmudict = EmptyDictionary()
    return g2p.G2p()


def main() -> None:
    """Pronounce every word of a file, one per line, several times; print the phonemes and the seconds of each pass."""
    words = Path(sys.argv[1]).read_text().split()
    model = pronouncer()
    for word in words[:50]:
        model.predict(word)
    seconds, phonemes = [], []
    for _ in range(int(sys.argv[2])):
        started = time.perf_counter()
        phonemes = [" ".join(model.predict(word)) for word in words]
        seconds.append(time.perf_counter() - started)
    print(json.dumps({"seconds": seconds, "said": phonemes}))


if __name__ == "__main__":
    main()
