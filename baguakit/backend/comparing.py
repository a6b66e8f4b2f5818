"""The comparison of calls: ranks that call different collectives are named before anything is mixed.

For each collective every rank sends every other one line of 128 bytes:

    8       a digest of the call: operation, reduction, shape, dtype, layout, root, method, exact or compressed
    8       in an all-to-all, how many values follow for the rank that reads it, and how many it is to send
    112     the call in words

An exact collective of gloo begins when the lines of all ranks agree: gloo reads the bits of one dtype as another, adds
the values of two reductions, and ends a process that gets more bytes than it waits for. What is compressed does not
wait: it sends first messages meanwhile, with the digest in their tags, so that messages of other calls never arrive.
"""

from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from struct import pack, unpack_from
from typing import Any

import torch

from ..comm.comm import TAGS
from ..monitor import Monitor, differing
from .methods import ALL_TO_ALL, Call
from .policy import name_of

LINE, HEAD, TAIL = 128, 8, 16  # bytes; the begin of the counts, and of the words
WRAP = 1 << 32  # counts are sent modulo this


def described(call: Call, exact: bool) -> str:
    """Return all attributes of a call in words: on ranks that make the same call, the same words."""
    method = call.passed[0][0] if exact and call.passed else ""
    same = method.replace("_", "") in ("", call.operation.replace("_", ""))
    said = [call.operation] + ["exact" if same else f"exact by {method}"] * exact
    values, kinds, forms = 0, dict[str, None](), dict[str, None]()  # in order, each once
    for x in call.whole if call.alike is None else call.alike:
        values += x.numel()
        kinds[_name(x.dtype)] = None
        layout = "" if x.layout is not torch.strided or x.is_contiguous() else f" with strides {x.stride()}"
        if x.layout is not torch.strided:
            forms[f"{_name(x.layout)} {tuple(x.shape)}"] = None
        elif layout or x.dim() > 1:
            forms[f"shape {tuple(x.shape)}{layout}"] = None
    if call.splits is not None:
        said += [f"of {kind}" for kind in sorted(kinds)]
    elif kinds:
        said += [f"of {values:,} values of {' and '.join(kinds)}", *forms]
    if call.op is not None:
        said.append(name_of(call.op))
    if call.root is not None:
        said.append(f"root {call.root}")
    return ", ".join(said) if exact else ", ".join(said).replace(", of ", " of ", 1)


def _name(kind: Any) -> str:
    return str(kind).removeprefix("torch.")


@lru_cache(1 << 10)
def parts_of(label: str) -> tuple[int, bytes, bytes]:
    """Return the number in the tags of the messages of a call, and the begin and the end of its lines."""
    digest, words = blake2b(label.encode(), digest_size=HEAD).digest(), label.encode().ljust(LINE - TAIL)
    if len(words) > LINE - TAIL:
        words = words[: LINE - TAIL - 20] + b" ... " + digest.hex()[:15].encode()
    return int.from_bytes(digest, "little") % TAGS, digest, words


def compare(
    group: Any, monitor: Monitor, label: str, number: int, splits: tuple[list[int], list[int]] | None
) -> Callable[[], None]:
    """Send the lines of a call, the `number`-th of a group over gloo; all ranks do, in the order of their calls.

    The function that is returned waits for the lines of all ranks. It raises an error that names the rank whose call
    differs.
    """
    rank, n = group.rank(), group.size()
    here, there = splits or ([0] * n, [0] * n)
    _, head, tail = parts_of(label)
    mine, expected = b"", b""
    for sends, receives in zip(here, there, strict=True):
        mine += head + pack("II", sends % WRAP, receives % WRAP) + tail
        expected += head + pack("II", receives % WRAP, sends % WRAP) + tail
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    arriving = torch.empty_like(sent)
    works = [getattr(group, ALL_TO_ALL)(arriving, sent, [], [])]

    def meet() -> None:
        if not works:
            return
        works.pop().wait()
        if (came := arriving.numpy().tobytes()) == expected:
            return
        lines = [came[i : i + LINE] for i in range(0, len(came), LINE)]
        if len({line[:HEAD] for line in lines}) > 1:
            calls = {r: line[TAIL:].rstrip().decode(errors="replace") for r, line in enumerate(lines)}
            raise monitor.fail(differing(number, calls))
        counts = [unpack_from("II", line, HEAD) for line in lines]
        odd = next(r for r, each in enumerate(counts) if each != (there[r] % WRAP, here[r] % WRAP))
        theirs, awaited = counts[odd]
        told = (odd, theirs, rank, there[odd]) if theirs != there[odd] % WRAP else (rank, here[odd], odd, awaited)
        raise monitor.fail(
            f"rank {told[0]} sends {told[1]:,} values to rank {told[2]} in {label}, as launch {number}, and rank "
            f"{told[2]} waits for {told[3]:,}; the output splits of a rank must be the input splits of the others"
        )

    return meet
