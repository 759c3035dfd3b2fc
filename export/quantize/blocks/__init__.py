"""Matrices in blocks of 4 and 8 bits: their products, and one whose first columns have more bits."""
