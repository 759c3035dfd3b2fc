"""The bundled grapheme-to-phoneme model: errors and words per second."""
