"""Tests of the executor: instructions one by one, control flow, memory and launches, and kernels of tutorials."""
