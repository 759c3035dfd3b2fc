"""Half precision: rewriting of graphs, and float32 graphs that round as it does."""
