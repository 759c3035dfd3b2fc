"""Pronounce words with an exported bundle: pip install 'fatdeploy[cpu]', no torch."""

import sys

import fatdeploy

with fatdeploy.load(sys.argv[1], threads=1) as model:
    options = fatdeploy.DecodeOptions(num_beams=5, num_return_sequences=2)
    for word, best in zip(sys.argv[2:], model.generate(sys.argv[2:], options), strict=True):
        print(f"{word}: {best.text} ({best.score:.2f}), or {best.alternatives[0].text}")
