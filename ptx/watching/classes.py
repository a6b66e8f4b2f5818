"""Classes of instructions, by the part of a multiprocessor that executes them.

integer      arithmetic, comparisons, selections and bits of integers; predicates
float        arithmetic, comparisons and selections in fp32 and halves
fp64         arithmetic, comparisons and selections in fp64
conversion   from one type to another
special      division, square roots and what else begins with an approximation by the special function unit
matrix       products of matrices
memory       loads, stores and atomic operations in global memory
shared       those in shared memory
warp         exchanges between the threads of a warp
control      jumps and barriers
move         moves between registers, and loads of parameters
"""

CLASSES = ("integer", "float", "fp64", "conversion", "special", "matrix", "memory", "shared", "warp", "control", "move")
BY_OPCODE = {
    **dict.fromkeys(("bra", "ret", "exit", "bar", "barrier", "membar", "fence"), "control"),
    **dict.fromkeys(("shfl", "vote", "match", "redux", "activemask"), "warp"),
    **dict.fromkeys(("ldmatrix", "stmatrix"), "shared"),
    **dict.fromkeys(("mov", "cvta"), "move"),
    **dict.fromkeys(("mad", "rem", "bfe", "bfi", "bfind", "brev", "clz", "popc", "prmt", "shf", "shl"), "integer"),
    **dict.fromkeys(("shr", "and", "or", "xor", "not", "cnot", "lop3", "sad", "mul24", "mad24", "dp2a"), "integer"),
    "cvt": "conversion",
    "fma": "float",
    **dict.fromkeys(("sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"), "special"),
    "mma": "matrix",
    "cp": "memory",
}
BY_TYPE = ("add", "sub", "mul", "neg", "abs", "min", "max", "setp", "set", "selp", "slct", "copysign", "testp", "div")
SPACES = {"global": "memory", "shared": "shared", "param": "move"}
INTEGERS = ("pred", *(f"{letter}{width}" for letter in "bus" for width in ("16", "32", "64", "16x2")))
FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f32x2", "f64")


def class_of(instruction) -> str:
    """Return the class of an instruction; raise Unknown, which names it, if it has none."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if opcode in ("ld", "st", "atom", "red"):
        found = SPACES.get(next((each for each in modifiers if each in (*SPACES, "const", "local")), "global"))
    elif opcode in BY_TYPE or BY_OPCODE.get(opcode) == "float":
        found = _of_type(opcode, modifiers)
    else:
        found = BY_OPCODE.get(opcode)
    if found is None:
        raise instruction.unknown("class of such an instruction")
    return found


def _of_type(opcode, modifiers):
    """The class of arithmetic, from the last type that is named: a conversion inside it is a part of it."""
    kinds = [each for each in modifiers if each in FLOATS]
    if "f64" in kinds:
        return "fp64"
    if kinds:
        return "special" if opcode == "div" else "float"
    return "integer" if modifiers and modifiers[-1] in INTEGERS else None
