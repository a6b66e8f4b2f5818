"""Fused steps of optimizers."""
