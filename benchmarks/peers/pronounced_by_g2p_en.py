"""Pronounce words with the neural model of the g2p-en package, word by word; prints JSON. Runs where it is installed.

Its constructor wants a dictionary that is downloaded; an empty one takes its place, so that the model says every word.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


class EmptyDictionary:
    """Stands in for the dictionary: it knows no word."""

    def dict(self) -> dict[str, Any]:
        """Return no entry."""
        return {}


def pronouncer() -> Any:
    """Return the package's model."""
    import nltk

    nltk.data.find = lambda *_, **__: True
    from g2p_en import g2p

    g2p.cmudict = EmptyDictionary()
    return g2p.G2p()


def main() -> None:
    """Pronounce every word of a file, a line each, so many times; print what was said and the seconds of each time."""
    words = Path(sys.argv[1]).read_text().split()
    model = pronouncer()
    for word in words[:50]:
        model.predict(word)
    seconds, said = [], []
    for _ in range(int(sys.argv[2])):
        started = time.perf_counter()
        said = [" ".join(model.predict(word)) for word in words]
        seconds.append(time.perf_counter() - started)
    print(json.dumps({"seconds": seconds, "said": said}))


if __name__ == "__main__":
    main()
