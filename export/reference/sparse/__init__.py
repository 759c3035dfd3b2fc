"""Attention of the encoder to some positions only: which a head sees, and forms that compute nothing else."""
