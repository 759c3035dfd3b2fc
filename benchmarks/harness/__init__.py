"""What benchmarks share: preparing, processes that take turns, timing, targets."""
