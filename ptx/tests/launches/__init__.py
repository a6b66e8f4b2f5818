"""Tests of what many threads do: control flow, memory, and launches as Triton makes them."""
