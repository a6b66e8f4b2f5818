"""Kernels that find, pack and apply the values that have changed, bit for bit."""
