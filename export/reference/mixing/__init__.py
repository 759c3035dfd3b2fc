"""Mixing of positions without attention: learned matrices, and averages weighted by keys and positions."""
