"""Commands of the command line that need torch."""
