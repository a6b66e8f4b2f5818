"""An instruction while it is decoded: its modifiers, and functions that read and write its operands.

PTX ISA, sections 6.4 "Operand Types" and 9.4 "Type Information for Instructions and Operands".
"""

from functools import partial

import numpy as np

from ..numbers.types import (
    DTYPES,
    HALVES,
    PACKED,
    SIGNED,
    UNSIGNED,
    constant,
    double_to_halves,
    halves_to_double,
    is_float,
    width_of,
)
from ..text import Address, Float, Integer, Name, Negated, Pair, Register, Sink, Special, Vector

# Chapter 10.
CLOCKS = {"%globaltimer", "%clock64"}
SPECIAL = {f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"}
SPECIAL |= {"%laneid", "%warpid"} | CLOCKS


class Form:
    """An instruction whose modifiers are taken one by one; what nobody takes is unknown.

    `source` returns a function of (frame, on) that reads an operand's values in lanes, as an array or, of a constant,
    one value. `target` returns a function of (frame, on, values) that writes them.
    """

    def __init__(self, instruction, kernel):
        self.instruction, self.kernel = instruction, kernel
        self.modifiers, self.operands = list(instruction.modifiers), instruction.operands

    # Modifiers.

    def flag(self, name):
        """Take a modifier; return whether it was there."""
        found = name in self.modifiers
        if found:
            self.modifiers.remove(name)
        return found

    def choice(self, *names, default=None):
        """Take the one of some modifiers that is there."""
        return next((name for name in names if self.flag(name)), default)

    def kinds(self, count=1, among=None):
        """Take the types at the end; with `among`, they must be some that the instruction can have."""
        kinds = [self.modifiers.pop() for _ in range(min(count, len(self.modifiers)))][::-1]
        known = [each for each in kinds if (each in among if among else each in DTYPES or each in HALVES)]
        if len(known) < count:
            raise self.unknown(f"type .{'.'.join(kinds)} of it")
        return kinds[0] if count == 1 else kinds

    def end(self, operands=None):
        """All modifiers have been taken, and there are as many operands."""
        if self.modifiers:
            raise self.unknown(f"modifier .{self.modifiers[0]} of it")
        if operands is not None and len(self.operands) != operands:
            raise self.unknown(f"form of it with {len(self.operands)} operands")

    def unknown(self, what):
        return self.instruction.unknown(what)

    # Sources.

    def source(self, operand, kind):
        """Read operand `operand`, an index or the operand itself, as a type."""
        operand = self.operands[operand] if isinstance(operand, int) else operand
        if kind in HALVES:
            return _widened(self.source(operand, "b16"), kind)
        dtype, width = DTYPES[kind], width_of(kind)
        if isinstance(operand, Negated):
            return partial(_negated, self.source(operand.register, kind))
        if isinstance(operand, Register):
            return self._register(operand, dtype, width)
        if isinstance(operand, Special):
            if operand.name not in SPECIAL:
                raise self.unknown(f"special register {operand.name}")
            return partial(_special, operand.name, dtype)
        value = self._constant(operand, kind, width)
        return lambda frame, on: value

    def _register(self, register, dtype, width):
        name, held = register.name, register.width
        if held < width or (held > width and width == 1):
            raise self.unknown(f"{width}-bit value in the {held}-bit register {name}")
        if width == 1 or (held == width and dtype is UNSIGNED[width]):
            return lambda frame, on: _lanes(frame.register(name, held), on)
        if held == width:
            return lambda frame, on: _lanes(frame.register(name, held), on).view(dtype)
        return lambda frame, on: _lanes(frame.register(name, held), on).astype(UNSIGNED[width]).view(dtype)

    def _constant(self, operand, kind, width):
        if isinstance(operand, Integer) and kind == "pred":
            return np.bool_(operand.value)
        if isinstance(operand, Integer) and not is_float(kind):
            return constant(operand.value, width).view(DTYPES[kind])
        if isinstance(operand, Float) and operand.width == width:
            return constant(operand.bits, width).view(DTYPES[kind])
        if isinstance(operand, Name) and operand.name in self.kernel.shared and width >= 32:
            return constant(self.kernel.shared[operand.name], width).view(DTYPES[kind])
        raise self.unknown(f"operand {operand} of type .{kind}")

    def sources(self, first, count, kind):
        return [self.source(place, kind) for place in range(first, first + count)]

    def packed(self, operand, kind):
        """Read a packed operand, of type f16x2 or the like: a list of its parts, the lowest first."""
        part = PACKED[kind]
        width = width_of(part)
        read = self.source(operand, f"b{2 * width}")
        shift = UNSIGNED[2 * width](width)

        def parts(frame, on):
            raw = np.asarray(read(frame, on))
            halves = [(raw >> (shift * raw.dtype.type(k))).astype(UNSIGNED[width]) for k in (0, 1)]
            return [halves_to_double(h, part) if part in HALVES else h.view(DTYPES[part]) for h in halves]

        return parts

    # Targets.

    def target(self, operand, kind):
        """Write values of a type; a wider register is filled with zeros, or of a signed type with its sign."""
        operand = self.operands[operand] if isinstance(operand, int) else operand
        if isinstance(operand, Sink):
            return lambda frame, on, values: None
        if not isinstance(operand, Register):
            raise self.unknown(f"result {operand}")
        name, held, width = operand.name, operand.width, width_of(kind)
        if held < width or (held > width and 1 in (held, width)):
            raise self.unknown(f"result of {width} bits in the {held}-bit register {name}")
        convert = _raw_of(kind, width, held)
        return lambda frame, on, values: _write(frame.register(name, held), on, convert(values))

    def packed_target(self, operand, kind):
        """Write the parts of a packed value, the lowest first."""
        part = PACKED[kind]
        width = width_of(part)
        wide = UNSIGNED[2 * width]
        write = self.target(operand, f"b{2 * width}")
        convert = _raw_of(part, width, width)

        def both(frame, on, values):
            low, high = (convert(np.asarray(value)).astype(wide) for value in values)
            write(frame, on, low | (high << wide(width)))

        return both

    # Others.

    def vector(self, operand):
        """The registers of a vector operand; of another, itself."""
        operand = self.operands[operand]
        return operand.items if isinstance(operand, Vector) else (operand,)

    def pair(self, operand):
        """The two results of `d|p`; of a single one, it and none."""
        operand = self.operands[operand]
        return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())

    def address(self, operand):
        """Read `[base + offset]`, as 64-bit integers."""
        operand = self.operands[operand]
        if not isinstance(operand, Address):
            raise self.unknown(f"address {operand}")
        offset = np.int64(operand.offset)
        if isinstance(operand.base, Register) and operand.base.width not in (32, 64):
            raise self.unknown(f"address in a register of {operand.base.width} bits")
        wide = isinstance(operand.base, Register) and operand.base.width == 64
        base = self.source(operand.base, "u64" if wide else "u32")
        return lambda frame, on: base(frame, on).astype(np.int64) + offset


def _lanes(values, on):
    return values if on is None else values[on]


def _special(name, dtype, frame, on):
    values = _lanes(frame.special(name), on)
    return values.astype(dtype) if np.dtype(dtype).itemsize != 4 else values.view(dtype)


def _negated(read, frame, on):
    return ~read(frame, on)


def _widened(read, kind):
    return lambda frame, on: halves_to_double(np.asarray(read(frame, on)), kind)


def _raw_of(kind, width, held):
    """Return what makes the bits of a register from values of a type."""
    if kind == "pred":
        return lambda values: values
    if kind in HALVES:
        return lambda values: double_to_halves(values, kind).astype(UNSIGNED[held])
    dtype, raw = DTYPES[kind], UNSIGNED[held]
    wider = SIGNED[held] if kind[0] == "s" else UNSIGNED[held]

    def convert(values):
        assert values.dtype == dtype, f"{values.dtype} is no .{kind}"
        if held != width:
            values = (values if kind[0] == "s" else values.view(UNSIGNED[width])).astype(wider)
        return values.view(raw)

    return convert


def _write(register, on, values):
    if on is None:
        register[...] = values
    else:
        register[on] = values
