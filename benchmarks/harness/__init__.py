"""What benchmarks share: options, prepared models, processes that take turns, timing, rows, targets."""
