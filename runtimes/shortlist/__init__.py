"""The shortlist of a bundle: which target tokens go with which source tokens, built from texts."""
