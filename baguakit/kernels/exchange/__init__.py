"""Exchanges between the ranks of a node in one kernel, through memory that all of them can reach."""
