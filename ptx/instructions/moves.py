"""Moves between registers and memory: PTX ISA, section 9.7.9 "Data Movement and Conversion Instructions": mov, ld, st,
cvta. Addresses are what they are in memory: a generic address is one of global memory."""

import numpy as np

from ..numbers.types import UNSIGNED, width_of
from ..text import Name, Vector
from .strength import strength_of

TYPES = (*(f"{letter}{width}" for letter in "bus" for width in (16, 32, 64)), "f32", "f64", "pred")
MEMORY_TYPES = ("b8", "u8", "s8", *TYPES[:-1])
# They say where a cache should keep the bytes, or order accesses among threads: `strength_of` reads which.
HINTS = {
    *("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "cta", "cluster", "gpu", "sys", "nc"),
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "L1", "L2", "::evict_normal", "::evict_unchanged", "::evict_first"),
    *("::evict_last", "::no_allocate", "::64B", "::128B", "::256B", "::cta"),
}


def _any_type(modifiers):
    return True


def _mov(form):
    kind = form.kinds(1, TYPES)
    form.end(2)
    if isinstance(form.operands[0], Vector):
        return _unpack(form, kind)
    if isinstance(form.operands[1], Vector):
        return _pack(form, kind)
    read, write = form.source(1, kind), form.target(0, kind)
    return lambda frame, on: write(frame, on, read(frame, on))


def _part(form, kind, count):
    width = width_of(kind)
    if kind[0] != "b" or width // count not in UNSIGNED:
        raise form.unknown(f"vector of {count} in .{kind}")
    return width // count


def _unpack(form, kind):
    """`mov.b64 {a, b}, d`: the parts of d, the lowest first."""
    registers = form.vector(0)
    width = _part(form, kind, len(registers))
    read, writes = form.source(1, kind), [form.target(each, f"b{width}") for each in registers]

    def action(frame, on):
        whole = np.asarray(read(frame, on))
        for k, write in enumerate(writes):
            write(frame, on, (whole >> whole.dtype.type(k * width)).astype(UNSIGNED[width]))

    return action


def _pack(form, kind):
    """`mov.b64 d, {a, b}`: one value of parts, the lowest first."""
    registers = form.vector(1)
    width, whole = _part(form, kind, len(registers)), UNSIGNED[width_of(kind)]
    reads, write = [form.source(each, f"b{width}") for each in registers], form.target(0, kind)

    def action(frame, on):
        value = whole(0)
        for k, read in enumerate(reads):
            value = value | (read(frame, on).astype(whole) << whole(k * width))
        write(frame, on, value)

    return action


def _access(form):
    """Take the modifiers of an access; return its type, its state space, and how many elements it has."""
    kind = form.kinds(1, MEMORY_TYPES)
    space = form.choice("global", "shared", "param", default="global")
    count = int(form.choice("v2", "v4", "v8", default="v1")[1])
    check_strength(form)
    form.modifiers = [each for each in form.modifiers if each not in HINTS]
    form.end(2)
    return kind, space, count


def check_strength(form):
    if strength_of(form.instruction.opcode, form.instruction.modifiers) is None:
        raise form.unknown("such order and scope of an access")


def space_of(frame, name):
    return frame.memory if name == "global" else frame.shared


def _ld(form):
    kind, space, count = _access(form)
    registers = form.vector(0)
    if len(registers) != count:
        raise form.unknown(f"vector of {len(registers)} for .v{count}")
    writes = [form.target(each, kind) for each in registers]
    if space == "param":
        return _ld_param(form, kind, writes)
    address, size, instruction = form.address(1), width_of(kind) // 8, form.instruction

    def action(frame, on):
        values = space_of(frame, space).load(frame, on, address(frame, on), size, count, instruction)
        frame.tell("happened", values)
        for write, value in zip(writes, values, strict=True):
            write(frame, on, _typed(value, kind))

    return action


def _typed(raw, kind):
    return raw.view({"s": f"i{width_of(kind) // 8}", "f": f"f{width_of(kind) // 8}"}.get(kind[0], raw.dtype))


def _ld_param(form, kind, writes):
    """A parameter is read as a whole, in its own width or a narrower one."""
    name = getattr(form.operands[1], "base", None)
    known = {each.name: width_of(each.type) for each in form.kernel.parameters}
    if not isinstance(name, Name) or name.name not in known or form.operands[1].offset or len(writes) > 1:
        raise form.unknown("such parameter")
    if known[name.name] < width_of(kind):
        raise form.unknown(f"parameter of {known[name.name]} bits as .{kind}")
    narrow = UNSIGNED[width_of(kind)]
    return lambda frame, on: writes[0](frame, on, _typed(frame.parameters[name.name].astype(narrow), kind))


def _st(form):
    kind, space, count = _access(form)
    registers = form.vector(1)
    if space == "param" or len(registers) != count:
        raise form.unknown(f"store of {len(registers)} to .{space}")
    size, instruction = width_of(kind) // 8, form.instruction
    reads, address = [form.source(each, f"b{8 * size}") for each in registers], form.address(0)

    def action(frame, on):
        values = [read(frame, on) for read in reads]
        space_of(frame, space).store(frame, on, address(frame, on), size, values, instruction)
        frame.tell("happened", values)

    return action


def _cvta(form):
    """An address of global memory as a generic one, or back: the same."""
    kind = form.kinds(1, ("u32", "u64"))
    form.flag("to")
    if not form.flag("global"):
        raise form.unknown("generic address of such memory")
    form.end(2)
    read, write = form.source(1, kind), form.target(0, kind)
    return lambda frame, on: write(frame, on, read(frame, on))


DECODERS = {"mov": (_any_type, _mov), "ld": (_any_type, _ld), "st": (_any_type, _st), "cvta": (_any_type, _cvta)}
