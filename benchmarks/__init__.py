"""What is measured, and how. Run a module from the repository's folder: ``python -m benchmarks.greedy.run``."""
