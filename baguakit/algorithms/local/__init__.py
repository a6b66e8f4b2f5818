"""Algorithms with local steps: ranks train alone, and average their weights now and then."""
