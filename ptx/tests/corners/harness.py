"""Run a few lines of PTX on given registers, a thread for each value, and read the result."""

import numpy as np

from ptx.machine import Frame, Launch, Program
from ptx.memory import Global
from ptx.numbers.types import UNSIGNED
from ptx.text import WIDTHS

MODULE = """.version 8.7
.target sm_90
.extern .shared .align 16 .b8 room[];
.visible .entry tried()
.reqntid {threads}
{{
{registers}
{body}
ret;
}}
"""


def run(body, threads, registers, programs=1, shared=0, regions=(), observers=()):
    """Execute lines on registers: {name: (type, values or None)}. Return the frame, whose registers can be read."""
    declared = " ".join(f".reg .{kind} %{name};" for name, (kind, _) in registers.items())
    program = Program(MODULE.format(threads=threads, registers=declared, body=body))
    launch = Launch((programs, 1, 1), (), Global(regions), shared, observers)
    frame = Frame(program, launch, 0, programs)
    for name, (kind, values) in registers.items():
        if values is not None:
            width = WIDTHS[kind]
            raw = [bool(each) if width == 1 else each % (1 << width) for each in values]
            frame.registers[f"%{name}"] = np.array(raw, bool if width == 1 else UNSIGNED[width])
    with np.errstate(all="ignore"):
        program.run_frame(frame)
    return frame


def result(line, d, **sources):
    """Execute one instruction; return the raw bits of `%d`, of type `d`, of each thread.

    Sources are (type, values), of which all have as many.
    """
    (threads,) = {len(values) for _, values in sources.values()}
    frame = run(line + ";", threads, {"d": (d, None)} | sources)
    return frame.registers["%d"].tolist()


def table(line, d, kinds, rows):
    """Execute one instruction on rows (a, b, …, expected); return the results and what is expected, in hexadecimal."""
    columns = list(zip(*rows, strict=True))
    kinds = [kinds] * (len(columns) - 1) if isinstance(kinds, str) else kinds
    sources = {name: (kind, values) for name, kind, values in zip("abce", kinds, columns, strict=False)}
    got, width = result(line, d, **sources), WIDTHS[d]
    return [hex(each) for each in got], [hex(each % (1 << width)) for each in columns[-1]]
