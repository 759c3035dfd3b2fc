"""Blanks before punctuation, which some tokenizers remove from what they write."""

# In this order, as transformers does it.
_REPLACEMENTS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
_BEGINNINGS = tuple({pattern[:end] for pattern, _ in _REPLACEMENTS for end in range(1, len(pattern))})


def cleaned(text: str) -> str:
    """Return a text without blanks before punctuation and English contractions."""
    for pattern, replacement in _REPLACEMENTS:
        text = text.replace(pattern, replacement)
    return text


def may_change(text: str) -> bool:
    """Return whether what follows a text may change how its end is cleaned."""
    return text.endswith(_BEGINNINGS)
