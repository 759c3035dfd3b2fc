"""Integers in the place of floats: calibration, rewriting of graphs, and the gate."""
