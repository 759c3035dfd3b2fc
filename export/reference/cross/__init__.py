"""Attention of the target to the source."""
