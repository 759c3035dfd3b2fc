"""Training of the reference models on pairs of texts."""
