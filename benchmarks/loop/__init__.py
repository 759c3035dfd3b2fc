"""The decode loop itself, over an engine that costs nothing."""
