"""Integers instead of floats: calibration, rewriting of graphs, and the gate."""
