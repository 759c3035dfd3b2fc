"""The README's tables and picture, from the committed results."""
