"""From modules to graphs, each target in its dialect."""
