"""Exchanges in one hop write rows and signals to other ranks, and read nothing there: run with `--ptx ARCH`."""

import pytest

pytest.importorskip("triton")
from row_exchanges import AllGather, AllToAll, NeighborMean, Place, ReduceScatter, run

from baguakit.compressors import MinMaxUInt8, UInt4

RANKS, CTAS, LENGTH = 2, 2, 2 * 4096  # of a shard or a row: of whole tiles
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("only_executed")]


@pytest.fixture(scope="module")
def table():
    """Bytes and sectors to one other rank for each value of a row, signals left out."""
    rows: dict = {}
    yield rows
    print("\nexchange, format: bytes and sectors of 32 bytes to another rank for each value that it gets")
    for name, (bytes_, sectors) in rows.items():
        print(f"{name}: {bytes_:.4f} bytes, {sectors:.4f} sectors, {bytes_ / sectors / 32:.0%} of them full")


def row_bytes(codec, n):
    """Return the bytes of a row that hold values."""
    if codec is None:
        return 4 * n
    layout = codec.form.layout(n, codec.block)
    return layout.row - sum(part.stop - part.start for part in layout.zeros)


EXCHANGES = {
    "all-gather": lambda codec: AllGather(RANKS, LENGTH, codec),
    "reduce-scatter": lambda codec: ReduceScatter(RANKS, LENGTH, codec),
    "all-to-all": lambda codec: AllToAll(RANKS, LENGTH, codec),
    "mean of neighbours": lambda codec: NeighborMean(RANKS, LENGTH),
}


CASES = [(name, codec) for name in EXCHANGES for codec in (None, MinMaxUInt8(), UInt4())][:-2]  # neighbours: exact


@pytest.mark.parametrize("name, codec", CASES, ids=str)
def test_a_rank_writes_rows_and_signals_to_others_and_reads_nothing_there(name, codec, executed_gpu, table):
    exchange = EXCHANGES[name](codec)
    *_, done = run(executed_gpu, Place([exchange], CTAS), exchange)
    signals = CTAS
    for rank, other in ((0, 1), (1, 0)):
        n = exchange.splits[rank][other] if isinstance(exchange, AllToAll) else LENGTH
        rows = row_bytes(codec, n)
        assert done.traffic.bytes[rank, other, "write"] == rows + 4 * signals
        assert done.traffic.bytes[rank, other, "read"] == 0
        if n:
            sectors = done.traffic.sectors[rank, other, "write"] - signals
            table[f"{name}, {codec or 'fp32'}"] = rows / n, sectors / n
