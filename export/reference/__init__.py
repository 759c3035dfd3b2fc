"""The reference models in PyTorch: the ground truth that every graph and every runtime is compared with."""
