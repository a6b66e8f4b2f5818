"""Many ranks: how the cost of one rank depends on n, the number of all ranks.

    python -m bench.scaling.many one      one rank of up to 16,384, counted: minutes; load does not matter
    python -m bench.scaling.many all      up to 64 real ranks on this machine, timed: wants an idle one
    python -m bench.scaling.many page     this page, from the JSON in bench/results

What does not grow with n:

* an exchange with a few neighbours: its messages, bytes, Python calls, memory and threads, for every topology that has
  few neighbours, whichever round it is (`tests/test_topology_many.py`, `tests/bench/test_many.py`);
* requests to the store: two in a heartbeat while training, and a few at `attach`, where ranks compare digests and, if
  they are more than 32, open no connection before the first message on it;
* the checks of `attach`, which read the facts that a topology declares.

What grows with n, and why:

* `bytegrad` and other compressed means send a row to every rank, 2 (n − 1) messages of 1/n of the bucket each; sparse
  means gather the rows of all. `bk.hierarchical` lets one rank of each node send them.
* an all-reduce is one call, and a ring of 2 (n − 1) messages within it; its bytes are 2 (n − 1)/n of the bucket.
* `choco` keeps two copies of the weights for each round of a period: 2 log₂ n for `OnePeerExact()`.
* `FullyConnected` and rank 0 of `Star` hear all ranks. `Chosen` exchanges a table of n² bytes before a round.
* `push_sum` follows the weights of all ranks with an n × n matrix; `matrix`, `draw`, `spectral_gap` and, without a
  closed form, `rounds_to_exactness` look at the matrices.
* a `FromMatrix` has n² weights, and a topology of one's own that declares no `facts` is looked at row by row, once.
* `RandomMatching` sorts n numbers in a round, in NumPy: a millisecond for 16,384 ranks.
* `att.timeline()` gathers the steps of all ranks, and `BaseK` with a large k has k neighbours.
"""
