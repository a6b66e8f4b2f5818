"""The wire formats in blocks: each a file with its definition, and one with the same in Triton."""
