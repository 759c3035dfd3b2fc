"""One model under load from many threads."""
