"""Definitions compiled for the CPU, and kept in libraries."""
