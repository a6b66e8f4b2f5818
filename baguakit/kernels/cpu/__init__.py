"""Compile definitions for the CPU, and store them in libraries."""
