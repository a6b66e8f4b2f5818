"""The control flow of a kernel: its blocks, and the order in which threads that have diverged run.

PTX ISA, section 9.7.12 "Control Flow Instructions" and chapter 3 "Independent Thread Scheduling". PTX does not say
when threads that diverged run together again; it says only who waits for whom (`bar`, and the warp instructions with
`.sync`). Here, of all blocks in which there are threads, that of the lowest rank runs next. Ranks follow the order of
the graph, and all blocks of a loop have ranks below those of what comes after it, so that threads meet again where all
paths from the branch do. The head of a loop comes last in it: nobody begins the next turn before all have ended this.
"""

from dataclasses import dataclass, field

from .faults import Unknown
from .instructions.strength import WEAK, strength_of
from .text import Instruction, Kernel

# Threads wait for others here, so a block begins with it.
WAITING = {"bar", "barrier", "shfl", "vote", "match", "redux", "ldmatrix", "stmatrix", "mma"}
JUMPS = {"bra", "ret", "exit"}


def pauses(instruction: Instruction) -> bool:
    """Tell whether others are to run before it: it orders accesses, or what it finds depends on others."""
    if instruction.opcode in ("fence", "membar", "nanosleep"):
        return True
    strength = strength_of(instruction.opcode, instruction.modifiers)
    return strength not in (None, WEAK) and "shared" not in instruction.modifiers


@dataclass
class Block:
    """Instructions that run one after another, and then where threads go: `jump` if it holds, or on to `next`.

    Attributes:
        waits: the first instruction waits for other threads.
        jump: the `bra`, `ret` or `exit` at its end.
        next, target: ranks of blocks; the number of all blocks is the end of the kernel.
    """

    instructions: list[Instruction] = field(default_factory=list)
    jump: Instruction | None = None
    next: int = 0
    target: int = 0

    @property
    def waits(self):
        return bool(self.instructions) and self.instructions[0].opcode in WAITING


def blocks_of(kernel: Kernel) -> tuple[list[Block], int]:
    """Return the blocks by rank, and the rank of the first to run."""
    blocks, names = _divided(kernel)
    for place, block in enumerate(blocks):
        block.next = place + 1
        block.target = _target(block.jump, names, len(blocks)) if block.jump else place + 1
    leads = [{block.target} | ({block.next} if _goes_on(block) else set()) for block in blocks]
    leads = [{each for each in targets if each < len(blocks)} for targets in leads]
    order = _arranged(set(range(len(blocks))), 0, leads)
    rank = {place: number for number, place in enumerate(order)}
    for block in blocks:  # what no path reaches is dropped
        block.next, block.target = (rank.get(place, len(order)) for place in (block.next, block.target))
    return [blocks[place] for place in order], rank[0]


def _goes_on(block):
    """A thread can come to the block that follows: it does not jump, or only if its guard holds."""
    return block.jump is None or block.jump.guard is not None


def _divided(kernel):
    """Return the blocks in the order of the text, and before which of them each label stands."""
    labelled = {}
    for name, place in kernel.labels.items():
        labelled.setdefault(place, []).append(name)
    blocks, names = [Block()], {}
    for place, instruction in enumerate(kernel.instructions):
        last = blocks[-1]
        begins = place in labelled or instruction.opcode in WAITING
        if last.jump or (begins and last.instructions):
            blocks.append(Block())
        names |= dict.fromkeys(labelled.get(place, ()), len(blocks) - 1)
        if instruction.opcode in JUMPS:
            blocks[-1].jump = instruction
        else:
            blocks[-1].instructions.append(instruction)
    names |= dict.fromkeys(labelled.get(len(kernel.instructions), ()), len(blocks))
    return blocks, names


def _target(jump, names, end):
    if jump.opcode != "bra":
        return end
    if set(jump.modifiers) - {"uni"} or getattr(jump.operands[0], "name", None) not in names:
        raise Unknown(f"{jump}: the executor knows no such jump")
    return names[jump.operands[0].name]


def _arranged(places, entry, leads):
    """Return the places that can be reached from `entry`, in the order of ranks."""
    order = []
    for component in reversed(_components(places, entry, leads)):
        head = component[0]  # the first that was reached
        if len(component) > 1:
            # The jumps to its head left out, what is left of a loop has loops of its own.
            inside = set(component) - {head}
            for inner in sorted(inside & leads[head]):
                order += [each for each in _arranged(inside, inner, leads) if each not in order]
        order.append(head)
    return order


def _components(places, entry, leads):
    """Tarjan's strongly connected components, the last in the order of the graph first; each begins with its head."""
    index, low, stack, found = {}, {}, [], []
    path = [(entry, iter(sorted(leads[entry] & places)))]  # no recursion, which long kernels would take too deep
    while path:
        place, others = path[-1]
        if place not in index:
            index[place] = low[place] = len(index)
            stack.append(place)
        for other in others:
            if other not in index:
                path.append((other, iter(sorted(leads[other] & places))))
                break
            if other in stack:
                low[place] = min(low[place], index[other])
        else:
            path.pop()
            if path:
                before = path[-1][0]
                low[before] = min(low[before], low[place])
            if low[place] == index[place]:
                at = stack.index(place)
                found.append(stack[at:])
                del stack[at:]
    return found
