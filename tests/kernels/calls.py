"""For every variant of a kernel, calls of its launcher that need it, on hostile values, compared with the definition.

`CALLS[name](variant)` makes those of a variant of the kernel of that name, and yields pairs: the result, and what it
is by the definition on the CPU.
"""

import torch
from formats import FORMATS, KEY
from hostile import KINDS, hostile

from baguakit.kernels import mixing, mixing_gpu, topk, topk_gpu
from baguakit.kernels.blockwise import definition as blockwise
from baguakit.kernels.blockwise import gpu as blockwise_launch
from baguakit.kernels.changes import definition as changes
from baguakit.kernels.changes import gpu as changes_gpu

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
KEYS = (KEY, 0, (1 << 64) - 1)
WEIGHTS = (0.5, -0.75, 0.0, 2.0**-120, 3.0)


# Wire formats.


def lengths(variant):
    """Lengths of rows that end with the tile, or with a part of one; odd ones, where the next row begins anywhere."""
    block, tile = variant.facts["block"], variant.values
    if not variant.facts["masked"]:
        return (tile + 77, 2 * tile + 1) if variant.facts["narrow"] else (tile, 2 * tile)
    return sorted({1, 2, 7, 16, block // 2 + 3, block - 1, tile - 1, tile - 16, tile + block // 2} - {0, tile})


def rows_of(variant, dtype):
    """Yield the values (rows, n) of a call.

    Rows at multiples of 16 go together, all kinds of values; so do rows at odd places, for their variants; others
    begin where the tensor does, two kinds by turns.
    """
    together = variant.facts["narrow"] and not variant.facts["masked"]
    for call, n in enumerate(lengths(variant)):
        rows = [hostile(kind, n, dtype, seed) for seed, kind in enumerate(KINDS)]
        if together or n % 16 == 0:
            yield torch.stack(rows)
        else:
            yield from (rows[(2 * call + i) % len(rows)][None] for i in range(2))


def coding(variant):
    format, dtype = FORMATS[variant.facts["format"]][0], DTYPES[variant.facts["dtype"]]
    keys = KEYS if variant.constants.get("DRAWN") else (None,)
    for call, x in enumerate(rows_of(variant, dtype)):
        yield format, variant.facts["block"], x, keys[call % len(keys)]


def compress(variant):
    for format, block, x, key in coding(variant):
        lost = [torch.empty(x.shape) if variant.facts["residual"] else None for _ in range(2)]
        packed = [
            m.compress(format, x, block, r, key) for m, r in zip((blockwise_launch, blockwise), lost, strict=True)
        ]
        yield packed
        if variant.facts["residual"]:
            yield lost


def answers(variant, ok=True):
    """Return for the kernel and the definition a bool to answer by, if the variant does."""
    return [torch.tensor(ok) if variant.facts["told"] else None for _ in range(2)]


def decompress(variant):
    for format, block, x, _ in coding(variant):
        packed = blockwise.compress(format, x, block)
        out, told = (torch.empty_like(x), torch.empty_like(x)), answers(variant)
        blockwise_launch.decompress_(format, out[0], packed, block, told[0])
        blockwise.decompress_(format, out[1], packed, block, told[1])
        yield out
        if variant.facts["told"]:
            yield told


def sent_rows(variant):
    """Yield (format, block, packed rows, length, key) for one to five rows: the kernels take them four at a time."""
    for n in lengths(variant):
        for call, count in enumerate((1, 2, 4, 5)):
            first = {"format": FORMATS[variant.facts["format"]][0], "block": variant.facts["block"]}
            rows = torch.stack([hostile(KINDS[(call + i) % len(KINDS)], n, seed=i) for i in range(count)])
            key = KEYS[call % len(KEYS)] if variant.constants.get("DRAWN") else None
            yield *first.values(), blockwise.compress(first["format"], rows, first["block"]), n, key


def add(variant):
    for call, (format, block, packed, n, _) in enumerate(sent_rows(variant)):
        out = hostile(KINDS[call % len(KINDS)], n, DTYPES[variant.facts["dtype"]], seed=9)
        outs, weights = (out.clone(), out), torch.tensor(WEIGHTS)[: len(packed)]
        blockwise_launch.add_(format, outs[0], packed, weights, block)
        blockwise.add_(format, outs[1], packed, weights, block)
        yield outs


def reduce(variant):
    for call, (format, block, packed, n, key) in enumerate(sent_rows(variant)):
        lost = [hostile(KINDS[call % len(KINDS)], n, seed=9) if variant.facts["residual"] else None for _ in range(2)]
        told = answers(variant, ok=False)
        yield [
            m.reduce(format, packed, n, block, r, key, ok)
            for m, r, ok in zip((blockwise_launch, blockwise), lost, told, strict=True)
        ]
        if variant.facts["told"]:
            yield told
        if variant.facts["residual"]:
            yield lost


# Mixing and landing.


def streams(variant, count):
    """Yield tensors of the dtype of a variant, as long as it needs, whose kinds meet in several ways."""
    tile, dtype = variant.values, DTYPES[variant.facts["dtype"]]
    for n in (1, 2, 15, tile - 1) if variant.facts["masked"] else (tile, 2 * tile):
        for call in range(len(KINDS)):
            yield [hostile(KINDS[(call + i * (1 + call // 3)) % len(KINDS)], n, dtype, seed=i) for i in range(count)]


def mix(variant):
    begun = variant.facts["out"] != variant.facts["dtype"] or variant.facts["begun"] != variant.facts["dtype"]
    count = variant.facts["count"] * (1 + begun)
    weights = [WEIGHTS[i % len(WEIGHTS)] for i in range(count + 1)]
    for x, *others in streams(variant, count + 1):
        ours = x.clone()
        mixing_gpu.mix_(ours, others, weights)
        mixing.mix_(x, others, weights)
        yield ours, x


def land(variant):
    for x, result, before in streams(variant, 3):
        x = torch.where(torch.arange(len(x)) % 3 == 0, x, before)
        for good in map(torch.tensor, (True, False)) if variant.facts["told"] else (None,):
            ours, theirs = x.clone(), x.clone()
            mixing_gpu.land_(ours, result, before, good)
            mixing.land_(theirs, result, before, good)
            yield ours, theirs


# The k largest.


def largest(variant):
    """Rows of whole chunks, and others that end with a part of one, of which all, many, few or one is kept."""
    chunk, few, dtype = variant.facts["chunk"], variant.facts["k"], DTYPES[variant.facts["dtype"]]
    for call, kind in enumerate(KINDS):
        n = (chunk, chunk - 1, 3 * chunk, chunk // 2 + 1)[call % 4]
        k, rest = ((few, 1), (chunk // 6, chunk // 7), (chunk, n % chunk))[call % 3]
        x = hostile(kind, n, dtype)[None]
        residuals = [torch.empty(1, n) if variant.facts["residual"] else None for _ in range(2)]
        each = [
            m.select(x, chunk, k, rest if n % chunk else 0, lost)
            for m, lost in zip((topk_gpu, topk), residuals, strict=True)
        ]
        yield from zip(*each, strict=True)
        if variant.facts["residual"]:
            yield residuals


def join(variant):
    """Rows of as many places as fill the last byte of each plane, or not, and of more than one tile."""
    chunk, tile = 1 << variant.facts["bits"], topk_gpu.TILE
    for rows, count in ((1, 1), (3, 7), (1, 8), (2, tile - 3), (1, tile + 1)):
        places = torch.randint(
            0, chunk, (rows, count), dtype=torch.int32, generator=torch.Generator().manual_seed(count)
        )
        values = torch.stack([hostile(KINDS[row], count, seed=row) for row in range(rows)])
        size = topk.values_at(count, chunk) + 4 * count * variant.facts["values"]
        packed = [torch.empty(rows, size, dtype=torch.uint8) for _ in range(2)]
        oks = [torch.tensor(False) if variant.facts["asking"] else None for _ in range(2)]
        for m, each, ok in zip((topk_gpu, topk), packed, oks, strict=True):
            m.join_(each, places, values if variant.facts["values"] else None, chunk, ok)
        yield packed
        if variant.facts["asking"]:
            yield oks


def add_rows(variant):
    """One to four ranks' rows of whole chunks, and others that end with a part of one, to what is there or to zero."""
    chunk, dtype = variant.facts["chunk"], variant.facts["dtype"]
    for call, kind in enumerate(KINDS):
        n, rows = (chunk, chunk - 1, 3 * chunk, chunk + chunk // 2)[call % 4], call % 4 + 1
        k = (chunk // 100 + 1, chunk // 6, chunk)[call % 3]
        rest = min(n % chunk, k)
        x = torch.stack([hostile(KINDS[(call + row) % len(KINDS)], n, seed=row) for row in range(rows)])
        places, values = topk.select(x, chunk, k, rest)
        packed = torch.empty(rows, topk.values_at(places.shape[1], chunk) + 4 * places.shape[1], dtype=torch.uint8)
        topk.join_(packed, places, values, chunk)
        apart = None if call % 2 else 0.5 * values
        out = hostile(kind, n, DTYPES[dtype], seed=9)
        outs, weights = (out.clone(), out), torch.tensor(WEIGHTS)[:rows] if variant.facts["weighted"] else None
        oks = [torch.tensor(True) if variant.facts["asked"] else None for _ in range(2)]
        for m, each, ok in zip((topk_gpu, topk), outs, oks, strict=True):
            m.add_(each, packed, apart, weights, chunk, k, rest, ok)
        yield outs
        if variant.facts["asked"]:
            yield oks


# Values that have changed.


def changed(variant):
    """Blocks of each kind, with d of every width; the last one is cut off."""
    size = variant.facts["size"]
    places = torch.arange(5 * changes.BLOCK + 77)
    for step in (1, *(1 << 8 * bytes - 1 for bytes in range(1, size))):
        old = hostile(KINDS[0], len(places) * size // 4 + 1, torch.float32, step % 7).view(torch.uint8)
        old = old[: len(places) * size].clone()
        new, share = old.clone(), (places // changes.BLOCK).clamp(max=4)
        moved = (share == 1) & (places % 50 == 0) | (share == 2) & (places % 3 == 0) | (share > 2)
        new.view(changes.WORDS[size])[moved] += torch.tensor(step).to(changes.WORDS[size])
        copies = [old.clone() for _ in range(2)]
        (heads, packed), theirs = (m.encode(new, x, size) for m, x in zip((changes_gpu, changes), copies, strict=True))
        yield heads, theirs[0]
        yield packed[0], torch.cat(theirs[1])
        yield copies
        lengths = changes.lengths_of(heads)
        changes_gpu.add_(old, size, heads, lengths.cumsum(0) - lengths, packed[0])
        yield old, new


CALLS = {
    "few_kernel": changed,
    "many_kernel": changed,
    "gather_kernel": changed,
    "apply_kernel": changed,
    "compress_kernel": compress,
    "decompress_kernel": decompress,
    "add_kernel": lambda variant: (add_rows if "weighted" in variant.facts else add)(variant),
    "reduce_kernel": reduce,
    "mix_kernel": mix,
    "land_kernel": land,
    "select_kernel": largest,
    "join_kernel": join,
}
