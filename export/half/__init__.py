"""Half precision: graphs rewritten to it, and float32 graphs that round the same way."""
