"""Bundles on TensorRT and TensorRT-RTX: plans, their memory and their calls."""
