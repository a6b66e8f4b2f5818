"""The wire formats in blocks: what they share, and each beside the same in Triton."""
