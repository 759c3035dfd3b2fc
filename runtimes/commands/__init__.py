"""Commands of the command line that a device has."""
