"""Products of matrices by a warp: PTX ISA, section 9.7.14.5, mma.sync, d = a · b + c.

    m16n8k16, m16n8k8    a and b of f16 or bf16, c and d of f32
    m16n8k8, m16n8k4     a and b of tf32: f32 whose last 13 bits are not read

Each of the 32 lanes holds a part of each matrix, a *fragment*. With g = lane div 4 and t = lane mod 4, a register of
a, of two halves or of one tf32 (w = 2 or 1 values), holds row g, or g + 8, and columns w t to w t + w − 1, or those
4 w further on; of b, such rows of column g. c and d have rows g and g + 8 and columns 2 t and 2 t + 1.

The manual leaves the precision and the order of sums open. Here a sum is that of fp64, rounded to f32 once.
"""

import numpy as np

WARP = 32
G, T = np.arange(WARP) // 4, np.arange(WARP) % 4
ROWS, COLUMNS = 16, 8


def _any_type(modifiers):
    return True


def _places(width, across, step):
    """Yield, by register, and within it by value, the lanes' coordinates (m or n, and k) in a matrix with k columns.

    Registers go through `across` groups of eight rows first, then through the columns.
    """
    for start in range(0, step, 4 * width):
        for group in range(across):
            yield [(G + 8 * group, start + width * T + value) for value in range(width)]


def _read(form, operand, kind, across, step):
    """Return what reads a fragment as a matrix of fp64 for each warp: (warps, 8 · across, step)."""
    width = 1 if kind == "tf32" else 2
    places, registers = list(_places(width, across, step)), form.vector(operand)
    if len(registers) != len(places):
        raise form.unknown(f"fragment of {len(registers)} registers of .{kind}")
    reads = [form.source(each, "b32") if width == 1 else form.packed(each, f"{kind}x2") for each in registers]

    def matrix(frame, on):
        made = np.zeros((len(frame.lanes(on)) // WARP, 8 * across, step))
        for read, coordinates in zip(reads, places, strict=True):
            values = [_tf32(read(frame, on))] if width == 1 else read(frame, on)
            for (row, column), value in zip(coordinates, values, strict=True):
                made[:, row, column] = np.reshape(value, (-1, WARP))
        return made

    return matrix


def _tf32(raw):
    return (np.asarray(raw) & np.uint32(0xFFFFE000)).view(np.float32)


def _mma(form):
    kinds = form.kinds(4, ("f32", "f16", "bf16", "tf32"))
    shape = form.choice("m16n8k16", "m16n8k8", "m16n8k4")
    ordinary = form.flag("sync") & form.flag("aligned") & form.flag("row") & form.flag("col")
    known = {"f16": ("m16n8k16", "m16n8k8"), "bf16": ("m16n8k16", "m16n8k8"), "tf32": ("m16n8k8", "m16n8k4")}
    if not ordinary or kinds[0::3] != ["f32", "f32"] or kinds[1] != kinds[2] or shape not in known.get(kinds[1], ()):
        raise form.unknown("such product of matrices")
    form.end(4)
    step = int(shape.removeprefix("m16n8k"))
    a, b = _read(form, 1, kinds[1], 2, step), _read(form, 2, kinds[1], 1, step)
    sums = [(row, column) for row in (G, G + 8) for column in (2 * T, 2 * T + 1)]
    reads, writes = ([f(each, "f32") for each in form.vector(k)] for f, k in ((form.source, 3), (form.target, 0)))
    if (len(reads), len(writes)) != (4, 4):
        raise form.unknown("fragment of sums that has not four registers")

    def action(frame, on):
        total = a(frame, on) @ b(frame, on).swapaxes(1, 2)
        for read, write, (row, column) in zip(reads, writes, sums, strict=True):
            added = total[:, row, column].reshape(-1) + np.asarray(read(frame, on)).astype(np.float64)
            write(frame, on, added.astype(np.float32))

    return action


DECODERS = {"mma": (_any_type, _mma)}
