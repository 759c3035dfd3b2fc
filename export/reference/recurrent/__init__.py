"""Recurrent layers in the place of self-attention."""
