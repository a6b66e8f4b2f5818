"""Algorithms that average gradients: all ranks keep the same weights."""
