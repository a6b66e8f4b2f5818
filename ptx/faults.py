"""The errors of an executed kernel. Each is a sentence that names the instruction and its line in the PTX."""


class Fault(Exception):
    """An instruction cannot be executed, or may not be: a GPU would stop, or do something undefined."""


class Unknown(Fault):
    """The executor does not know an instruction, a modifier, a type, or an operand."""


class MemoryFault(Fault):
    """An access lies outside what the kernel was given, or at an address that its width does not divide."""


class DivergenceFault(Fault):
    """Threads wait at a barrier, a vote or a shuffle for others that never come."""


class RaceFault(Fault):
    """Two threads access a byte, one of them writes, and nothing orders them."""


class UnwrittenFault(Fault):
    """A thread reads memory that nothing was written to."""


class SignalFault(Fault):
    """An access to a word of signals orders nothing between ranks."""


class OwnerFault(Fault):
    """A kernel of a rank accesses memory of another that is not symmetric."""


class DeadlockFault(Fault):
    """Programs wait for words that nobody will write."""


class EndlessLoop(Fault):
    """A kernel ran for longer than the limit."""
