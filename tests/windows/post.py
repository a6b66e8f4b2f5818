"""Windows of several ranks in one process, and the connections between them, on which the test delivers."""

import torch

from baguakit.comm import Comm
from baguakit.windows import Window, window
from baguakit.windows.memory import Edge, Side
from baguakit.windows.messages import GONE

VALUES = 3


class Alone(Comm):
    """A rank of a group whose other ranks are in this process."""

    def _count(self, sent):
        pass

    def gather_objects(self, value, plain=False):
        return [value] * self.size


class Post:
    """Edges without a network: the test takes from them, and delivers."""

    def __init__(self, memory, rank, timeout):
        self.memory, self.rank, self.address = memory, rank, ("", 0)

    def start(self, token, addresses):
        self.edges = {peer: Edge(self.memory, peer) for peer in addresses}

    def close(self):
        self.memory.closed = True


def windows(monkeypatch, size, topology, zero, one=False):
    """Return the windows of all ranks, each over two tensors or over one."""
    made = []
    monkeypatch.setattr(window, "Links", Post)
    for rank in range(size):
        comm = object.__new__(Alone)
        vars(comm).update(rank=rank, size=size, _weights=None, _round=None)
        x = torch.arange(VALUES, dtype=torch.float64) + 8 * rank
        made.append(Window(x if one else [x[:1], x[1:].view(-1, 2)], topology, comm, zero=zero))
        made[-1].x = x
    return made


class Connection:
    """Both ends of the connection on which rank i asks rank j."""

    def __init__(self, all_windows, i, j):
        self.edge, self.memory, self.i = all_windows[i]._links.edges[j], all_windows[j]._memory, i
        self.connect()

    def connect(self):
        self.ours, self.theirs = Side(self.edge.memory.format), Side(self.memory.format)

    def deliver(self, answer_is_lost=False):
        answer = copied(self.memory.answer(self.i, copied(self.edge.packed(self.ours)), self.theirs))
        if answer.kind == GONE:  # the peer has dropped the edge
            self.edge.drop("the test")
        elif answer_is_lost:
            self.memory.unlock(self.i, self.theirs)  # as the end of a connection does
            self.connect()
        else:
            self.edge.done(answer, self.ours)


def copied(message):
    """Return a message as it arrives: in memory of its own."""
    return message._replace(payload=None if message.payload is None else message.payload.clone())


def deliver_all(lines, draw):
    """Deliver everything, in an order of chance."""
    while any(line.edge.pending for line in lines.values()):
        line = draw.choice([line for line in lines.values() if line.edge.pending])
        if line.edge.take():
            line.deliver()
