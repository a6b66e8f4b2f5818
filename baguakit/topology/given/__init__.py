"""Topologies built from the user's matrices and graphs, each for one number of ranks."""
