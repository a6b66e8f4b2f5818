"""Kernels touch few sectors of memory beside those that their values fill, at every length: run with `--ptx ARCH`.

Distinct sectors are what memory moves, requested ones what the first cache looks for: see `ptx.watching.counters`.
"""

import functools
import random

import pytest
import torch
from formats import FORMATS, NAMES

pytest.importorskip("triton")
LINE = 64  # values: what a bucket of an attached model, or a rank's part of it, is a multiple of
DISTINCT, ALIGNED, ODD = 1.05, 1.05, 1.3
# Averages of 1 and 4 bits ask the first cache for a sector more than once: their loads are short. Memory moves it once.
SHORT, ROTATED = 2.1, 1.1
ROWS, SECTOR = 3, 32
FOUND = random.Random(20)
DRAWN = [FOUND.randint(4096, 70_000) // unit * unit for unit in (LINE, 1, 1, 4) * 25]
GROUPS = [DRAWN[start : start + 5] for start in range(0, len(DRAWN), 5)]


@pytest.fixture
def counted(request, executed_gpu, monkeypatch):
    """Counts of launches; nothing else watches them."""
    if not request.config.getoption("ptx"):
        pytest.skip("runs with --ptx")
    from ptx.watching.counters import Counters

    found = []
    monkeypatch.setattr(executed_gpu, "watchers", (functools.partial(Counters, found),))
    return found


def check(counted, work, n, moved, headers=0, beside=0, least=0):
    """Work moves so many bytes, and so many headers of blocks, or values that are kept, by an instruction each.

    `beside` are the bytes that it moves, at most, of tables whose length is fixed; `least` is the least limit.
    """
    counted.clear()
    work()
    distinct, requested = (
        sum(sum(getattr(launch, name).values()) for launch in counted) * SECTOR for name in ("distinct", "requested")
    )
    limit = max(least, ALIGNED if n % LINE == 0 else ODD)
    assert moved <= distinct * 1.0001 and distinct <= DISTINCT * moved + beside, (n, distinct / moved)
    assert requested <= limit * moved + headers * SECTOR + beside, (n, requested / moved)


def of_format(counted, name, n, residual):
    """The operations of a format on rows of n values."""
    from baguakit.kernels.blockwise import gpu as launch

    (format, block, _), lost = FORMATS[name], 4 * residual
    blocks = -(-n // block)
    layout = format.layout(n, block)
    row = layout.row - sum(part.stop - part.start for part in layout.zeros)
    x, out, rest = torch.randn(ROWS, n), torch.empty(ROWS, n), torch.zeros(ROWS, n) if residual else None
    packed = launch.compress(format, x, block)
    # The signs of a rotation, which each program reads: a table as long as a block.
    table = 4 * block if format.rotated else 0
    signs = table * (n // max(block, launch.WARP) + 1) // SECTOR
    checked = functools.partial(check, counted, beside=table)
    compress = functools.partial(launch.compress, format, x, block, rest)
    checked(compress, n, ROWS * ((4 + lost) * n + row), ROWS * signs, least=ROTATED * format.rotated)
    checked(lambda: launch.decompress_(format, out, packed, block), n, ROWS * (4 * n + row), ROWS * (blocks + signs))
    weights, total, rest = torch.ones(ROWS), torch.zeros(n), torch.zeros(n) if residual else None
    add = functools.partial(launch.add_, format, total, packed, weights, block)
    apart = 1 if format.header_bytes == 1 else n  # float8: up to 1.14 at lengths of whole lines
    checked(add, apart, 8 * n + ROWS * row, ROWS * (blocks + n // 1024 + 1) + signs)  # and weights
    reduce = functools.partial(launch.reduce, format, packed, n, block, rest)
    reads = 2 if format.bits in (1, 2, 4) else 1  # of headers: first, whether a sum could round
    headers, least = (reads * ROWS + 1) * blocks + signs * residual, SHORT if format.bits in (1, 4) else 0
    checked(reduce, n, (ROWS + 1) * row + 2 * lost * n, headers, least=least)


def of_mixing(counted, n):
    from baguakit.kernels import mixing_gpu as gpu

    x, y, z = (torch.randn(n) for _ in range(3))
    check(counted, lambda: gpu.mix_(x, [y, z], [0.5, 0.25, 0.25]), n, 16 * n)
    check(counted, lambda: gpu.land_(x, y, z), n, 16 * n)


def of_top_k(counted, n):
    """Of a kept value the group and then the value are read again, and its place, value and loss are stored alone."""
    from baguakit.kernels import topk_gpu as gpu

    x, lost = torch.randn(2, n), torch.empty(2, n)
    k, rest = 10, -(-(n % 1024) // 100)
    kept = 2 * (n // 1024 * k + rest)
    check(counted, lambda: gpu.select(x, 1024, k, rest, lost), n, 16 * n + 8 * kept, headers=6 * kept)


def of_steps(counted, n, offset=0):
    """Tensors that begin `offset` values behind a multiple of sixteen bytes; a tile also reads where it lies."""
    from baguakit.kernels.steps import definition
    from baguakit.kernels.steps import gpu as launch
    from baguakit.kernels.steps import operators as table

    columns = {name: [torch.zeros(n + offset)[offset:]] for name in "pguv"}
    tables = table.tables_of(columns)
    conditions = definition.Conditions(lr=0.1, taken=3)
    work = functools.partial(launch.step_, definition.Adam(decoupled=True), tables, conditions)
    check(counted, work, n if offset == 0 else 1, 28 * n)  # unaligned, the limit is that of odd lengths


@pytest.mark.parametrize("n", [4096 + LINE, 6143])
def test_at_two_lengths(counted, n):
    of_format(counted, "minmax_uint8", n, residual=True)
    of_mixing(counted, n)
    of_steps(counted, n)


@pytest.mark.slow  # a hundred lengths
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_at_lengths_that_were_drawn(counted, group):
    for at, n in enumerate(GROUPS[group]):
        of_format(counted, NAMES[(group + at) % len(NAMES)], n, residual=group % 2 == 0)
        (of_mixing, of_top_k, of_steps, functools.partial(of_steps, offset=1))[(group + at) % 4](counted, n)
