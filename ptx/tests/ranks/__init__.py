"""Tests of several ranks at once: the memory model, orders, waits that never end, and kernels with signals."""
