"""Exchanges in one hop in one kernel, with faults of ordering planted in their source."""

from misordered import Planted
from row_exchanges import AllGather, AllToAll, Averaged, Exchange, NeighborMean, ReduceScatter

from ptx.faults import DeadlockFault

FILE = "rows_gpu.py"
SHORT: tuple[Exchange, ...] = (ReduceScatter(2, 257),)
# Rank 0 writes to rank 1, which writes to rank 2: each may come ahead of the next.
CHAIN = tuple(NeighborMean(3, 257, seed=seed, edges=((0, 1), (1, 2))) for seed in range(5))
# Who writes to whom changes.
TURNS = tuple(NeighborMean(3, 257, seed=k, edges=((k % 3, (k + 1) % 3), ((k + 1) % 3, k % 3))) for k in range(6))

BEFORE = "good = met(sends_ptr, own_ptr, words_at, rank, ranks, number - 1, control_ptr, limit, THREADS)"
BEHIND = "good = met(heard_ptr, own_ptr, words_at, rank, ranks, number, control_ptr, limit, THREADS)"
ALL = "good = all_heard(own_ptr, words_at, 0, ranks, number, control_ptr, limit, THREADS)"
SIGNALS = "        tell_all(peers_ptr, words_at, 0, ranks, rank, number, THREADS)\n"
BEGINS = "        for step in range(1 if ONE else ranks):\n"
WITH_ROWS = """        places = tl.arange(0, THREADS)
        told = (tl.load(sends_ptr + VALUES * ranks + places % ranks) > 0) | (places == rank)
        words = word_at(memory_of(peers_ptr, places % ranks), words_at, 0, ranks, rank)
        announce(words, number, tl.where(told, places, ranks), ranks)
"""
IMPORT = "import heard, word_at\n"
SLOT = "half_bytes // ranks // 16 * 16"
HALF = "(number & 1).to(tl.int64) * half_bytes"
KINDS = "        if neighbors != self.neighbors:\n"

PLANTED = {
    "no wait before neighbours write": Planted(FILE, ((BEFORE, "good = number == number"),), means=CHAIN),
    "a wait for the exchange before the last": Planted(
        FILE, ((BEFORE, BEFORE.replace("number - 1", "number - 2")),), means=CHAIN
    ),
    "a wait for those whom one hears before one writes": Planted(
        FILE, ((BEFORE, BEFORE.replace("sends_ptr", "heard_ptr")),), means=CHAIN
    ),
    "a wait for those to whom one writes before one reads": Planted(
        FILE, ((BEHIND, BEHIND.replace("heard_ptr", "sends_ptr")),), means=CHAIN
    ),
    "no wait before neighbours read": Planted(FILE, ((BEHIND, "good = number == number"),), means=CHAIN),
    "signals of neighbours only with rows": Planted(
        FILE,
        ((SIGNALS, WITH_ROWS), (IMPORT, IMPORT.replace("heard", "announce, heard"))),
        (DeadlockFault,),
        means=TURNS,
    ),
    "the signal before the rows": Planted(FILE, ((SIGNALS, ""), (BEGINS, SIGNALS + BEGINS)), means=SHORT),
    "no wait before shards are added": Planted(FILE, ((ALL, "good = number == number"),), means=SHORT),
    "one half used again": Planted(
        FILE, ((HALF, "0"),), means=tuple(AllGather(2, 257, seed=seed) for seed in range(3))
    ),
    "rows of all ranks at one place": Planted(
        FILE, (("half + rank * row_bytes,", "half,"), ("peer * row_bytes\n", "0\n")), means=(AllToAll(3, 257),)
    ),
    "a mean in the memory of neighbours": Planted(
        "tiles_gpu.py", ((KINDS, "        if False:\n"),), means=(*CHAIN[:2], Averaged(3, 257), *CHAIN[2:4])
    ),
}
