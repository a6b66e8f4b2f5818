"""The comparison of calls: ranks that call different collectives are named before anything is mixed.

For each collective every rank sends every other one line of 128 bytes:

    8       a digest of the call: operation, reduction, shape, dtype, layout, root, method, exact or compressed
    8       in an all-to-all, how many values follow for the rank that reads it, and how many it is to send
    112     the call in words

An exact collective of gloo begins when the lines of all ranks agree: gloo reads the bits of one dtype as another, adds
the values of two reductions, and ends a process that gets more bytes than it waits for. What is compressed does not
wait: it sends first messages meanwhile, with the digest in their tags, so that those of other calls never arrive.
"""

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack, unpack_from
from typing import Any

import torch
from torch import Tensor

from ..comm import TAGS
from ..monitor import differing
from .methods import ALL_TO_ALL, Call
from .policy import name_of

LINE, DIGEST, COUNT = 128, 8, 8  # bytes
WRAP = 1 << 32  # counts are sent modulo this


def described(call: Call, exact: bool) -> str:
    """Return all attributes of a call in words: on ranks that make the same call, the same words."""
    said = [call.operation]
    if exact:
        method = call.passed[0][0] if call.passed else ""
        same = method.replace("_", "") == call.operation.replace("_", "")
        said += ["exact"] if same or not method else [f"exact by {method}"]
    if call.splits is not None:
        said += sorted({f"of {describe(x.dtype)}" for x in call.whole})
    elif tensors := call.whole if call.alike is None else call.alike:
        kinds = " and ".join(dict.fromkeys(describe(x.dtype) for x in tensors))
        said.append(f"of {sum(x.numel() for x in tensors):,} values of {kinds}")
        said += filter(None, [", ".join(dict.fromkeys(map(form, tensors)))])
    said += [] if call.op is None else [name_of(call.op)]
    said += [] if call.root is None else [f"root {call.root}"]
    return ", ".join(said) if exact else ", ".join(said).replace(", of ", " of ", 1)


def form(x: Tensor) -> str:
    """Return the shape and layout of a tensor; "" of a flat one."""
    if x.layout is not torch.strided:
        return f"{describe(x.layout)} {tuple(x.shape)}"
    layout = "" if x.is_contiguous() else f" with strides {x.stride()}"
    return f"shape {tuple(x.shape)}{layout}" if layout or x.dim() > 1 else ""


def describe(value: Any) -> str:
    """Return the name of a dtype or layout."""
    return str(value).removeprefix("torch.")


def tag_of(label: str) -> int:
    """Return the number in the tags of the messages of a call."""
    return int.from_bytes(digest(label), "little") % TAGS


def digest(label: str) -> bytes:
    """Return a digest of a call."""
    return blake2b(label.encode(), digest_size=DIGEST).digest()


class Comparison:
    """The lines of one call, on their way. All ranks of the group begin it, in the order of their calls.

    Args:
        group: over gloo.
        label: the call in words.
        number: of the call in the group.
        splits: of an all-to-all: the values for each rank, and those from each.
    """

    def __init__(self, group: Any, label: str, number: int, splits: tuple[list[int], list[int]] | None) -> None:
        self.label, self.number, self.rank, n = label, number, group.rank(), group.size()
        head, words, room = digest(label), label.encode(), LINE - DIGEST - COUNT
        tail = words.ljust(room) if len(words) <= room else words[: room - 20] + b" ... " + head.hex()[:15].encode()
        self.sends, self.receives = splits or ([0] * n, [0] * n)

        def lines(there: Sequence[int], back: Sequence[int]) -> bytes:
            return b"".join([head + pack("II", a % WRAP, b % WRAP) + tail for a, b in zip(there, back, strict=True)])

        mine = torch.frombuffer(bytearray(lines(self.sends, self.receives)), dtype=torch.uint8)
        self.expected, self.lines = lines(self.receives, self.sends), torch.empty_like(mine)
        self.work: Any = getattr(group, ALL_TO_ALL)(self.lines, mine, [], [])

    def wait(self) -> str:
        """Wait for the lines of all ranks; return a sentence that names the rank whose call differs, or ""."""
        if self.work is None:
            return ""
        self.work.wait()
        self.work, came = None, self.lines.numpy().tobytes()
        if came == self.expected:
            return ""
        lines = [came[i : i + LINE] for i in range(0, len(came), LINE)]
        if len({line[:DIGEST] for line in lines}) > 1:
            calls = {r: line[DIGEST + COUNT :].rstrip().decode(errors="replace") for r, line in enumerate(lines)}
            return differing(self.number, calls)
        counts = [unpack_from("II", line, DIGEST) for line in lines]
        there, here = self.receives, self.sends
        odd = next(r for r, each in enumerate(counts) if each != (there[r] % WRAP, here[r] % WRAP))
        (sent, awaited), mine, ours = counts[odd], there[odd], here[odd]
        told = (odd, sent, self.rank, mine) if sent != mine % WRAP else (self.rank, ours, odd, awaited)
        return (
            f"rank {told[0]} sends {told[1]:,} values to rank {told[2]} in {self.label}, as launch {self.number}, and "
            f"rank {told[2]} waits for {told[3]:,}; the output splits of a rank must be the input splits of the others"
        )
