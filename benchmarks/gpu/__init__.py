"""``make test-gpu``: the acceptance run on a machine with a GPU."""
