"""Atomic operations: PTX ISA, section 9.7.13.13 "atom" and 9.7.13.14 "red".

Lanes that meet at one address come one after another, in ascending order; on a GPU the order is any.
"""

import numpy as np

from ..numbers.types import DTYPES, width_of
from .moves import HINTS, check_strength, space_of

INTEGERS = ("u32", "s32", "u64", "s64")
TYPES = {
    "add": (*INTEGERS, "f32", "f64"),
    "min": INTEGERS,
    "max": INTEGERS,
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "exch": ("b32", "b64"),
    "cas": ("b32", "b64"),
    "inc": ("u32",),
    "dec": ("u32",),
}
OPERATIONS = {
    "add": lambda old, b: old + b,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, b: b,
    "cas": lambda old, b, c: np.where(old == b, c, old),
    "inc": lambda old, b: np.where(old >= b, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, b: np.where((old == 0) | (old > b), b, old - old.dtype.type(1)),
}


def _any_type(modifiers):
    return True


def _atomic(returns):
    """`atom.op.type d, [a], b`: d becomes what was there. `red`: nobody wants to know."""

    def decode(form):
        space, name = form.choice("global", "shared", default="global"), form.choice(*OPERATIONS)
        if name is None or (name in ("exch", "cas") and not returns):
            raise form.unknown("such operation")
        kind = form.kinds(1, TYPES[name])
        check_strength(form)
        form.modifiers = [each for each in form.modifiers if each not in HINTS]
        form.end(2 + returns + (name == "cas"))
        write = form.target(0, kind) if returns else None
        address, sources = form.address(int(returns)), form.sources(1 + returns, 1 + (name == "cas"), kind)
        dtype, operation, instruction = DTYPES[kind], OPERATIONS[name], form.instruction

        def action(frame, on):
            shape = frame.lanes(on).shape
            addresses = np.broadcast_to(address(frame, on), shape)
            values = [np.broadcast_to(read(frame, on), shape) for read in sources]
            memory, size = space_of(frame, space), width_of(kind) // 8
            places = np.broadcast_to(memory.places(frame, on, addresses, size, 1, instruction), shape)
            old, new = in_order(memory.elements(size).view(dtype), places, values, operation)
            wrote = old == values[0] if name == "cas" else np.ones(shape, bool)
            frame.tell("happened", [old], new, wrote)
            if write:
                write(frame, on, old)

        return action

    return decode


def in_order(elements, places, values, operation):
    """Apply an operation at places, one lane after another; return what each found and left. Places that differ go
    together."""
    order = np.argsort(places, kind="stable")
    sorted_ = places[order]
    starts = np.flatnonzero(np.diff(sorted_, prepend=sorted_[:1] - 1))
    turn = np.arange(len(places)) - np.repeat(starts, np.diff(np.append(starts, len(places))))
    found, left = np.empty((2, len(places)), elements.dtype)
    by_turn = np.argsort(turn, kind="stable")
    for lanes in np.split(order[by_turn], np.flatnonzero(np.diff(turn[by_turn])) + 1):
        at = places[lanes]
        found[lanes] = elements[at]
        left[lanes] = elements[at] = operation(found[lanes], *(value[lanes] for value in values))
    return found, left


DECODERS = {"atom": (_any_type, _atomic(True)), "red": (_any_type, _atomic(False))}
