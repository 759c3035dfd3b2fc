"""Benchmarks. Run them from the root of the repository: ``python -m benchmarks.greedy.run``."""
