"""Formats and fused updates: each file states its PyTorch definition, and its Triton kernels equal that definition."""
