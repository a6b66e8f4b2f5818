"""The text of PTX as instructions: PTX ISA, chapters 4 "Syntax" and 6 "Instruction Operands".

A kernel is read whole: its parameters, the registers it declares, and its instructions in order. Of the module around
it only shared variables are kept; debugging sections and pragmas say nothing about what is computed.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass, field, replace

from .faults import Unknown

WIDTHS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "f16": 16, "f32": 32, "f64": 64}
WIDTHS |= {f"{sign}{width}": width for sign in "us" for width in (8, 16, 32, 64)}


@dataclass(frozen=True)
class Register:
    name: str
    width: int  # in bits; 1 for a predicate


@dataclass(frozen=True)
class Negated:
    """`!%p`, a source operand that is a predicate negated."""

    register: Register


@dataclass(frozen=True)
class Special:
    """A special register, chapter 10: `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Integer:
    """An integer constant, section 4.5.1: 64 bits, two's complement."""

    value: int


@dataclass(frozen=True)
class Float:
    """A floating-point constant, section 4.5.2, by its bits: `0f3F800000` or `0d3FF0000000000000`."""

    bits: int
    width: int


@dataclass(frozen=True)
class Name:
    """A label, a parameter or a variable."""

    name: str


@dataclass(frozen=True)
class Address:
    """`[base + offset]`."""

    base: object
    offset: int


@dataclass(frozen=True)
class Vector:
    """`{a, b}`."""

    items: tuple


@dataclass(frozen=True)
class Pair:
    """`%p|%q`, two results."""

    first: object
    second: object


@dataclass(frozen=True)
class Sink:
    """`_`, a result that nobody wants."""


@dataclass(frozen=True)
class Instruction:
    """An instruction: `@guard opcode.modifier.modifier operand, operand;` at a line of the text."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple
    guard: Register | Negated | None
    line: int
    text: str
    source: str = ""  # the lines of Python that it comes from, as `.loc` says

    def __str__(self):
        return f"line {self.line} of the PTX, `{self.text}`"

    @property
    def place(self) -> str:
        return f"{self.source} ({self})" if self.source else str(self)

    def unknown(self, what):
        return Unknown(f"{self}: the executor knows no {what}")


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str
    pointer: bool


@dataclass
class Kernel:
    """A kernel: `labels` say before which instruction they stand, `shared` at which byte a variable begins.

    `static` are the bytes of shared variables whose size the text states; what a launch asks for follows them.
    """

    name: str
    parameters: tuple[Parameter, ...]
    threads: int | None  # .reqntid
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    static: int = 0


def parse(ptx: str) -> Kernel:
    """Return the kernel of a module; there must be exactly one."""
    text = _without_comments(ptx)
    entries = list(re.finditer(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?([^{]*)\{", text))
    if len(entries) != 1:
        raise Unknown(f"the module has {len(entries)} kernels: the executor runs a module of one")
    (entry,) = entries
    parameters = tuple(_parameter(each) for each in (entry[2] or "").split(",") if each.strip())
    threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*1)*", entry[3])
    kernel = Kernel(entry[1], parameters, int(threads[1]) if threads else None)
    _shared_variables(kernel, text[: entry.start()])
    _Body(kernel, _sources(ptx)).read(text, entry.end())
    return kernel


def _sources(ptx):
    """Return, by line of the PTX, what each `.loc` says: "kernels.py:12, called at kernels.py:40"."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?([^"/]+)"', ptx, re.MULTILINE))
    found = {}
    for number, line in enumerate(ptx.split("\n"), 1):
        if match := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)[^/]*(.*)", line):
            calls = [f"{name}:{at}" for name, at in re.findall(r"([^\s\[:]+):(\d+):\d+", match[3])]  # Triton's comment
            found[number] = ", called at ".join(calls or [f"{files.get(match[1], 'a file')}:{match[2]}"])
    return found


def _without_comments(text):
    """Blank out comments and `.loc`, `.file`, which end with their line; every line stays where it is."""
    text = re.sub(r"/\*.*?\*/", lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*|^[ \t]*\.(?:loc|file)\b[^\n]*", "", text, flags=re.MULTILINE)


def _parameter(text):
    match = re.fullmatch(r"\s*\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(.*?)\s([\w$]+)\s*", text, re.DOTALL)
    if not match or match[1] not in WIDTHS:
        raise Unknown(f"the executor knows no parameter `{text.strip()}`")
    return Parameter(match[3], match[1], ".ptr" in match[2])


def _shared_variables(kernel, text):
    """Lay variables out in shared memory in their order, those of unknown size at the end (section 5.4.4)."""
    pattern = r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(?:\[(\d*)\])?\s*;"
    found = [(int(a or 1), WIDTHS[kind] // 8, name, size) for a, kind, name, size in re.findall(pattern, text)]
    for align, width, name, size in sorted(found, key=lambda each: each[3] == ""):
        kernel.static = -(-kernel.static // align) * align
        kernel.shared[name] = kernel.static
        kernel.static += width * int(size or 0)


STATEMENT = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[A-Za-z_$%][\w$]*):|(?P<statement>[^;]+?)\s*;)")
INSTRUCTION = re.compile(
    r"(?:@(?P<negated>!?)(?P<guard>%[\w$]+)\s+)?(?P<opcode>[a-z]\w*)(?P<modifiers>[\w.:]*)\s*(?P<rest>.*)"
)


class _Body:
    """The statements between the braces of a kernel; a name belongs to the innermost braces around it."""

    def __init__(self, kernel, sources):
        self.kernel, self.scopes, self.blocks, self.line = kernel, [{}], 0, 0
        self.sources, self.lines, self.open, self.jumps = sources, [*sources], [0], []

    @property
    def source(self):
        place = bisect_right(self.lines, self.line) - 1
        return self.sources[self.lines[place]] if place >= 0 else ""

    def read(self, text, at):
        line, after = text.count("\n", 0, at) + 1, at
        while self.scopes:
            match = STATEMENT.match(text, after)
            if not match:
                raise Unknown(f"line {line} of the PTX: the executor cannot read what follows")
            start = match.start(match.lastgroup)
            line, after = line + text.count("\n", after, start), start
            self.line = line
            self.take(match)
            line, after = line + text.count("\n", after, match.end()), match.end()
        for place, scopes in self.jumps:
            self.resolve(place, scopes)

    def resolve(self, place, scopes):
        """A jump goes to the label of the innermost braces around it that have one of its name."""
        jump = self.kernel.instructions[place]
        name = getattr(jump.operands[0], "name", None)
        known = [inner for each in scopes[::-1] if (inner := _within(name, each)) in self.kernel.labels]
        if known:
            self.kernel.instructions[place] = replace(jump, operands=(Name(known[0]),))

    def take(self, match):
        if match["brace"] == "{":
            self.blocks += 1
            self.scopes.append({})
            self.open.append(self.blocks)
        elif match["brace"]:
            self.scopes.pop()
            self.open.pop()
        elif match["label"]:
            self.kernel.labels[_within(match["label"], self.open[-1])] = len(self.kernel.instructions)
        elif match["statement"].startswith("."):
            self.directive(match["statement"])
        else:
            self.kernel.instructions.append(self.instruction(" ".join(match["statement"].split())))

    def directive(self, text):
        if text.startswith(".reg"):
            match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL)
            for name in match[2].split(","):
                self.declare(name.strip(), WIDTHS[match[1]])
        elif text.startswith(".shared"):
            _shared_variables(self.kernel, text + ";")
        elif not text.startswith((".pragma", ".local")):  # an instruction that names a local variable is refused
            raise Unknown(f"line {self.line} of the PTX, `{text}`: the executor knows no such directive")

    def declare(self, name, width):
        many = re.fullmatch(r"(.*)<(\d+)>", name)
        names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
        inner = f"@{self.blocks}" if len(self.scopes) > 1 else ""
        self.scopes[-1] |= {each: Register(each + inner, width) for each in names}

    def instruction(self, text):
        match = INSTRUCTION.fullmatch(text)
        if not match:
            raise Unknown(f"line {self.line} of the PTX: the executor cannot read `{text}`")
        guard = self.operand(match["negated"] + match["guard"]) if match["guard"] else None
        modifiers = tuple(filter(None, re.split(r"\.|(?=::)", match["modifiers"])))
        operands = tuple(self.operand(each) for each in _split(match["rest"]))
        if match["opcode"] == "bra":
            self.jumps.append((len(self.kernel.instructions), tuple(self.open)))
        return Instruction(match["opcode"], modifiers, operands, guard, self.line, text, self.source)

    def operand(self, text):
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if text[0] == "{":
            return Vector(tuple(self.operand(each) for each in _split(text[1:-1])))
        if text[0] == "[":
            match = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
            if not match:
                raise Unknown(f"line {self.line} of the PTX: the executor knows no address `{text}`")
            return Address(self.operand(match[1]), _integer(match[2] or "0"))
        if "|" in text:
            return Pair(*(self.operand(each.strip()) for each in text.split("|")))
        if text[0] == "!":
            return Negated(self.operand(text[1:]))
        return self.constant(text)

    def constant(self, text):
        if text == "_":
            return Sink()
        if text[0] == "%":
            return Special(text)
        if re.fullmatch(r"0[fF][\da-fA-F]{8}|0[dD][\da-fA-F]{16}", text):
            return Float(int(text[2:], 16), 4 * (len(text) - 2))
        if re.fullmatch(r"-?\d\w*", text):
            return Integer(_integer(text))
        if re.fullmatch(r"[A-Za-z_$][\w$]*", text):
            return Name(text)
        raise Unknown(f"line {self.line} of the PTX: the executor knows no operand `{text}`")


def _within(label, block):
    return f"{label}@{block}" if block else label


def _integer(text):
    """An integer constant, which C would read alike: 0x for hexadecimal, 0b for binary, 0 for octal, U for unsigned."""
    text, sign = text.rstrip("U").removeprefix("-"), -1 if text[0] == "-" else 1
    octal = re.fullmatch(r"0\d+", text)
    return sign * (int(text, 8) if octal else int(text, 0))


def _split(text):
    """Divide at the commas that no bracket encloses."""
    if "{" not in text and "[" not in text:
        return [part.strip() for part in text.split(",")] if text else []
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)
    return [part.strip() for part in parts if part.strip()]
