"""Failure detection and the agreement of `attach()` with up to 512 ranks: requests to the store, and seconds.

    python -m bench.control measure        a few minutes, on a quiet machine; one line of JSON for each finished cell
    python -m bench.control slow           ten minutes, and harder on a busy machine: 512 ranks, and a slow store
    python -m bench.control page           this page, from the results

The ranks of a row are real monitors, each with its two threads and a connection of its own to one `TCPStore`; all are
in one process, and the store in another one. No tensor is sent: every rank waits for a flight that never arrives. Then
one rank is cut off from the store, or the judge is. The heartbeat is 1 s, and the `timeout` 60 s, so that a rank is
dead after 15 s without a sign.
"""
