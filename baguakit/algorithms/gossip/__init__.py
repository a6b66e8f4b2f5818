"""Algorithms that average weights with a few neighbours in each step."""
