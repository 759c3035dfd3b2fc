"""Which of the published choices train."""
