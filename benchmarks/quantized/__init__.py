"""Quantized bundles against every peer on the CPU."""
