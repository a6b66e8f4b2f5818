"""Asynchronous copies from global to shared memory: PTX ISA, section 9.7.9.25, cp.async and its groups.

A copy is executed at once, which is one of the orders that a GPU may take. So a kernel that reads what was copied
before it has waited for the group is *not* found here.
"""

import numpy as np

from ..text import Integer
from .moves import HINTS

WORD = 4


def _any_type(modifiers):
    return True


def _cp(form):
    """`cp.async.ca.shared.global [to], [from], size{, length}`: `length` bytes, and zeros up to `size`, 4, 8 or 16."""
    if not form.flag("async"):
        raise form.unknown("such copy")
    if form.choice("commit_group", "wait_group", "wait_all"):
        form.end()
        return lambda frame, on: None
    spaces = form.flag("shared") & form.flag("global")
    form.modifiers = [each for each in form.modifiers if each not in HINTS]
    size = form.operands[2].value if len(form.operands) > 2 and isinstance(form.operands[2], Integer) else 0
    if not spaces or size not in (4, 8, 16):
        raise form.unknown("such copy")
    form.end(4 if len(form.operands) == 4 else 3)
    to, source, instruction = form.address(0), form.address(1), form.instruction
    length = form.source(3, "u32") if len(form.operands) == 4 else None

    def action(frame, on):
        lanes, places = frame.lanes(on), to(frame, on)
        wanted = np.broadcast_to(size if length is None else length(frame, on), lanes.shape)
        if not np.isin(wanted, (0, size)).all():
            raise instruction.unknown(f"copy of a part of the {size} bytes")
        words = [np.zeros(len(lanes), np.uint32) for _ in range(size // WORD)]
        full = np.flatnonzero(wanted)
        if len(full):
            addresses = np.broadcast_to(source(frame, on), lanes.shape)[full]
            loaded = frame.memory.load(frame, lanes[full], addresses, WORD, len(words), instruction)
            for word, values in zip(words, loaded, strict=True):
                word[full] = values
        frame.shared.store(frame, on, places, WORD, words, instruction)

    return action


DECODERS = {"cp": (_any_type, _cp)}
