"""Wire formats and fused updates. Each has a PyTorch definition, and Triton kernels that give the same bits."""
