"""Clusters as a `Network`, and the steps that `bk.tune.predict` predicts on them; see `bench.scaling`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

import baguakit as bk
from baguakit.compressors import MinMaxUInt8
from baguakit.tune import Codec, Compute, Line, Link, Network, predict

PASSES = (5, 5, 2)  # bytes that compressing, decompressing and averaging a value in 8 bits read and write
Algorithm = bk.rules.Algorithm


def cluster(
    nodes: int,
    per_node: int,
    between: Line,
    within: Line,
    codecs: Sequence[Codec] = (),
    senders: int | None = None,
    copy: float = 0.0,
    launch: float = 0.0,
) -> Network:
    """Describe nodes of some GPUs each, which share the interface of the node.

    Args:
        between: a message over an interface, alone.
        within: a message between two GPUs of a node.
        senders: the GPUs of a node that send to others at once in an exchange of all ranks; None: all of them.
    """
    shared = replace(between, beta=per_node * between.beta)
    exchanged = replace(between, beta=(per_node if senders is None else senders) * between.beta)
    ranks = nodes * per_node
    links = [Link("flat", 1, ranks, exchanged, between)]  # a ring crosses an interface once
    if per_node > 1:
        links += [Link("intra", 1, per_node, within, within), Link("inter", 1, nodes, shared, shared)]
    return Network(ranks, per_node, "cuda", 1, tuple(links), tuple(codecs), copy=copy, launch=launch)


def codec(speed: float) -> Codec:
    """Return the 8-bit codec of a machine whose kernels move so many bytes a second."""
    compress, decompress, average = (each / speed for each in PASSES)
    return Codec(repr(MinMaxUInt8()), compress, decompress, average)


@dataclass(frozen=True)
class Training:
    """A model as one rank trains it: values, images a step, and seconds of forward and backward alone.

    Attributes:
        messages: into which the gradients are divided.
    """

    values: int
    batch: int
    seconds: float
    messages: int = 1

    def compute(self, overlap: float) -> Compute:
        """Return the parts of a step; with the whole overlap, gradients are ready as backward begins."""
        ready = (1 - overlap,) * self.messages
        return Compute(self.seconds / 3, 2 * self.seconds / 3, ready=ready)


@lru_cache(maxsize=64)
def parameters(values: int, parts: int) -> nn.Module:
    """Return a model of so many values in equal parts, without memory."""
    with torch.device("meta"):
        return nn.ParameterList(nn.Parameter(torch.empty(values // parts)) for _ in range(parts))


def step(algorithm: Algorithm, training: Training, network: Network, overlap: float = 1.0) -> float:
    """Return the seconds of a step, with all of the possible overlap, or with none if `overlap` is 0."""
    model = parameters(training.values, training.messages)
    if overlap:
        return predict(algorithm, model, network, training.compute(overlap), bucket_bytes=1).seconds
    return training.seconds + predict(algorithm, model, network, Compute(0.0, 0.0), bucket_bytes=1).seconds


def throughput(algorithm: Algorithm, training: Training, network: Network, overlap: float = 1.0) -> float:
    """Return the images a second of all ranks."""
    return network.ranks * training.batch / step(algorithm, training, network, overlap)
