"""Means over the GPUs of a node in one kernel: what the executor counts, and what a node is predicted to take.

    python -m bench.exchange count       some minutes: executes the kernels, and writes the counts and this page
    python -m bench.exchange page        this page alone, from the counts in bench/results/

No GPU took part: nothing here was measured. The PTX of `baguakit/kernels/exchange` for sm_90 is executed for all ranks
at once (`ptx.ranks`), each result is compared with its definition, and accesses are counted by where they go.
"""
