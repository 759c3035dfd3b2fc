"""The certificate: a bundle against the original model, and where they differ first."""
