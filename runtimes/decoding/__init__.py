"""The one decode loop: sources in, searches that choose tokens, hypotheses and streams out."""
