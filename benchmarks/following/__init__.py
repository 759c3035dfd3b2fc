"""Attentions to the source that follow it, trained."""
