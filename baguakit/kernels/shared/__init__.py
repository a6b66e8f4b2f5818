"""Parts that kernels of several families use."""
