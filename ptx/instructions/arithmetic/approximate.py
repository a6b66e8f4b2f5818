"""Approximations of fp32: PTX ISA, section 9.7.3: `.approx` and `.full` of div, rcp, sqrt, rsqrt, ex2, lg2, sin, cos,
tanh.

The manual states a largest error, and no bits. Here each is the exact value, rounded to nearest: a GPU's result may
differ from it by that error, so compare what such a kernel computes with a tolerance.
"""

import numpy as np

from ...numbers.types import flushed, quiet


def _approximate(modifiers):
    return "approx" in modifiers or "full" in modifiers


def _decoder(function, count):
    def decode(form):
        kind = form.kinds(1, ("f32",))
        form.choice("approx", "full")
        flush = form.flag("ftz")
        form.end(count + 1)
        reads, write = form.sources(1, count, kind), form.target(0, kind)

        def action(frame, on):
            given = [np.asarray(read(frame, on)) for read in reads]
            given = [flushed(each) for each in given] if flush else given
            result = function(*(each.astype(np.float64) for each in given)).astype(np.float32)
            write(frame, on, quiet(flushed(result) if flush else result, kind))

        return action

    return decode


FUNCTIONS = {
    "div": (np.divide, 2),
    "rcp": (np.reciprocal, 1),
    "sqrt": (np.sqrt, 1),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 1),
    "ex2": (np.exp2, 1),
    "lg2": (np.log2, 1),
    "sin": (np.sin, 1),
    "cos": (np.cos, 1),
    "tanh": (np.tanh, 1),
}
DECODERS = {opcode: (_approximate, _decoder(*each)) for opcode, each in FUNCTIONS.items()}
