"""Greedy decoding against CTranslate2 and PyTorch."""
