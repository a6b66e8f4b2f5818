"""Blocks of values, each with a scale of its own: layout, definition, CPU dispatch, launches and Triton code."""
