"""The blockwise wire formats: their common parts, and for each its definition and its Triton functions."""
