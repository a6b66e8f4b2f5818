"""The parameters of a group, stepped as a few flat tensors."""
