"""The quality of a bundle on pairs with known references."""
