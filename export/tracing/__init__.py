"""From modules to graphs, in the dialect of each target."""
