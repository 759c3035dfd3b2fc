"""Beam search against CTranslate2, and the ways in which beams can share caches."""
