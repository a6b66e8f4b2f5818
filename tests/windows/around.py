"""The ranks around a rank that has a window."""

import torch

from baguakit.topology import Ring


def meet(comm):
    comm.all_reduce(torch.zeros(1, dtype=torch.float32))


def neighbours(comm, topology=None):
    row = (topology or Ring()).weights(comm.rank, comm.size, 0)
    return [peer for peer in row if peer != comm.rank]
