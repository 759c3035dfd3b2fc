"""Encoder self-attentions that decide from the source which keys a query sees: clusters, and sorted blocks."""
