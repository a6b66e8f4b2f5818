"""The blockwise wire formats: common parts, and for each format a definition in PyTorch and functions in Triton."""
