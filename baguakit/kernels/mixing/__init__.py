"""Weighted sums of tensors."""
