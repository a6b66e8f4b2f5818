"""Compile the definitions of wire formats for the CPU, and store the compiled code in libraries."""
