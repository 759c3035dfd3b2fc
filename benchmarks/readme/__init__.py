"""The tables and pictures of README and docs, from the committed results."""
