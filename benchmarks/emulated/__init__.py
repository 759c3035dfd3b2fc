"""Bundles on a CPU that this machine does not have, emulated: the same tokens, or a refusal."""
