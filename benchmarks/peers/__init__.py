"""Other people's engines, each in a process, and where it must be in an environment, of its own."""
