"""Tokenizers of Hugging Face folders, on their way into a bundle."""
