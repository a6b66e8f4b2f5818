"""Setups: the rules and parameters that ranks agree on, and the checks of them."""
