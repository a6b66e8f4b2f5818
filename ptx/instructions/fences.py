"""Fences and pauses: PTX ISA, sections 9.7.13.4 "membar, fence" and 9.7.13.19 "nanosleep".

Accesses are executed in the order of the text and seen at once, so that a fence does nothing but say what it orders.
"""

from .strength import SCOPES, Strength

LEVELS = {"cta": "cta", "gl": "gpu", "sys": "sys"}  # of membar


def _any_type(modifiers):
    return True


def _fence(form):
    """`fence{.sc, .acq_rel}.scope`; without an order it is `.acq_rel`."""
    order, scope = form.choice("sc", "acq_rel", default="acq_rel"), form.choice(*SCOPES)
    return _ordering(form, order, scope)


def _membar(form):
    """`membar.level` is `fence.sc` of its scope."""
    return _ordering(form, "sc", LEVELS.get(form.choice(*LEVELS)))


def _ordering(form, order, scope):
    if scope is None:
        raise form.unknown("such fence")
    form.end(0)
    strength, instruction = Strength(order, SCOPES[scope]), form.instruction
    return lambda frame, on: frame.tell("fenced", frame, on, strength, instruction)


def _nanosleep(form):
    """`nanosleep.u32 t`: others go on meanwhile, as they do at any time."""
    form.kinds(1, ("u32",))
    form.end(1)
    form.source(0, "u32")
    return lambda frame, on: None


DECODERS = {"fence": (_any_type, _fence), "membar": (_any_type, _membar), "nanosleep": (_any_type, _nanosleep)}
