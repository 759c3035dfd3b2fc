"""What runs on a device: engines and the one decode loop. Imports no torch, no onnx and nothing of ``export``."""
