"""Processors that change scores before a token is chosen."""
