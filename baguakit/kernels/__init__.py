"""Wire formats and fused updates. Each has a definition in PyTorch and Triton kernels that give the same bits."""
