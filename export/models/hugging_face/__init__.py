"""Folders of Hugging Face as reference models: mapped by tables of names, without importing transformers."""
