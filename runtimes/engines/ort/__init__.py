"""Bundles on ONNX Runtime: sessions, bindings and the memory of a decode."""
