"""Matrices of halves in shared memory: PTX ISA, section 9.7.14.5, ldmatrix and stmatrix.

A matrix has eight rows of sixteen bytes. Lane l holds bytes 4 (l mod 4) to 4 (l mod 4) + 3 of row l div 4; with
`.trans`, the halves 2 (l mod 4) and 2 (l mod 4) + 1 of column l div 4. Row r of matrix m is where lane 8 m + r says.
"""

import numpy as np

WARP = 32


def _any_type(modifiers):
    return True


def _matrices(form):
    kind, count = form.kinds(1, ("b16",)), form.choice("x1", "x2", "x4")
    ordinary = form.flag("sync") & form.flag("aligned") & form.flag("m8n8") & form.flag("shared")
    form.flag("::cta")
    if not ordinary or count is None:
        raise form.unknown(f"such matrices of .{kind}")
    transposed = form.flag("trans")
    form.end(2)
    return int(count[1]), transposed


def _rows(frame, on, addresses, matrix, transposed):
    """Addresses of what each lane holds of a matrix: of two halves of a word, one after another."""
    lanes = frame.lanes(on)
    base = np.zeros(frame.count, np.int64)
    base[lanes] = addresses
    lane = frame.thread_of[lanes].astype(np.int64) % WARP
    for half in (0, 1):
        row, column = (2 * (lane % 4) + half, lane // 4) if transposed else (lane // 4, 2 * (lane % 4) + half)
        yield base[lanes - lane + 8 * matrix + row] + 2 * column


def _row_addresses(frame, on, address, count, instruction):
    """The addresses that the lanes give; those of the rows of a matrix must be multiples of 16."""
    addresses = np.broadcast_to(address(frame, on), frame.lanes(on).shape)
    giving = frame.thread_of[frame.lanes(on)] % WARP < 8 * count
    frame.shared.aligned(frame, on, np.where(giving, addresses, 0), 16, instruction)
    return addresses


def _registers(form, place, count):
    """Return the registers of the vector at a place, one for each matrix."""
    registers = form.vector(place)
    if len(registers) != count:
        raise form.unknown(f"vector of {len(registers)} for .x{count}")
    return registers


def _ldmatrix(form):
    count, transposed = _matrices(form)
    registers = _registers(form, 0, count)
    writes, address, instruction = [form.target(each, "b32") for each in registers], form.address(1), form.instruction

    def action(frame, on):
        addresses = _row_addresses(frame, on, address, count, instruction)
        for matrix, write in enumerate(writes):
            places = _rows(frame, on, addresses, matrix, transposed)
            low, high = (frame.shared.load(frame, on, each, 2, 1, instruction)[0] for each in places)
            write(frame, on, low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16)))

    return action


def _stmatrix(form):
    count, transposed = _matrices(form)
    registers = _registers(form, 1, count)
    reads, address, instruction = [form.source(each, "b32") for each in registers], form.address(0), form.instruction

    def action(frame, on):
        addresses = _row_addresses(frame, on, address, count, instruction)
        for matrix, read in enumerate(reads):
            word = np.broadcast_to(read(frame, on), addresses.shape)
            for half, places in enumerate(_rows(frame, on, addresses, matrix, transposed)):
                part = (word >> np.uint32(16 * half)).astype(np.uint16)
                frame.shared.store(frame, on, places, 2, [part], instruction)

    return action


DECODERS = {"ldmatrix": (_any_type, _ldmatrix), "stmatrix": (_any_type, _stmatrix)}
