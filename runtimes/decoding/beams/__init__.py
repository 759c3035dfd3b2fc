"""Beam search: the beams of one source, plain, drawn or diverse, and those of a batch."""
