"""Models to export: found by name, read from a folder, or a user's own."""
