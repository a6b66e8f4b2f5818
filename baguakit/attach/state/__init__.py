"""Saved states: written, checked and loaded."""
