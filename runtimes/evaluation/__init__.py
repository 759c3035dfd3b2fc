"""Quality of a bundle on pairs whose right answers are known."""
