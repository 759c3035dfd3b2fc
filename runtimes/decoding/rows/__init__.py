"""Rows that do not depend on each other: greedy targets, samples, and targets of parallel models."""
