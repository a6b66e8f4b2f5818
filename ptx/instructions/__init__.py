"""The instructions of PTX: PTX ISA, section 9.7 "Instructions". `action_of` decodes one."""

from . import atomics, copies, fences, matrices, moves, products, warps
from .arithmetic import approximate, bits, comparison, conversion, floating, integer, logic
from .operands import Form

GROUPS = (
    *(integer, bits, approximate, floating, comparison, logic, conversion),
    *(moves, copies, warps, matrices, products, atomics, fences),
)
DECODERS = {}
for _group in GROUPS:
    for _opcode, _decoders in _group.DECODERS.items():
        DECODERS.setdefault(_opcode, []).append(_decoders)


def action_of(instruction, kernel):
    """Return the action of an instruction on a frame; raise Unknown if the executor does not know it.

    An opcode may stand for several groups, as `add` for integers and for floats: the first that takes its modifiers.
    """
    for takes, decode in DECODERS.get(instruction.opcode, ()):
        if takes(instruction.modifiers):
            return decode(Form(instruction, kernel))
    raise instruction.unknown("such instruction")
