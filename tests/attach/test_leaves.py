"""Gradients are accumulated on the streams of their forward passes, and a lane waits for each: shown without a GPU."""

from functools import partial

import pytest
import torch
from blind import Inline
from pool import ranks
from torch import nn
from torch.autograd import Variable

import baguakit as bk
from baguakit.attach import landings as leaves


class Stream:
    """A stream in name only."""

    device = torch.device("cpu")


class Engine:
    """Stands for autograd's: the gradients of `apart` are accumulated on `side`, all else happens on `main`."""

    def __init__(self, patch, weights, apart):
        self.main, self.side = Stream(), Stream()
        self.now, self.made = self.main, {}
        patch.setattr(leaves, "current_stream", lambda device: self.now)
        for i, p in enumerate(weights):
            p.register_hook(partial(self.accumulate, self.side if i in apart else self.main))

    def accumulate(self, stream, grad):
        """Before a gradient is accumulated: on this stream; backward ends on the main one."""
        self.now = stream
        Variable._execution_engine.queue_callback(self.ended)

    def ended(self):
        self.now = self.main

    def accumulated(self, p):
        """After baguakit's hook: the tensor that autograd has put there."""
        self.made[p] = p.grad


def trained(patch, apart, backward, bucket_bytes):
    """The model, what its lane was told in a backward, and the streams, by name."""
    from baguakit.runtime import runtime

    model, lane = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)), Inline()
    weights = [layer.weight for layer in model]
    engine = Engine(patch, weights, apart)
    patch.setattr(runtime, "lane", lambda *_, **named: lane)
    with bk.attach(model, None, bk.algorithms.gradient_allreduce(), bucket_bytes=bucket_bytes) as att:
        att._life.backward.leaves = leaves.LeafStreams()  # as on a GPU
        for p in weights:
            p.register_post_accumulate_grad_hook(engine.accumulated)
        lane.told.clear()
        backward(att, model)
    names = {engine.main: "main", engine.side: "side"}
    followed = [sorted(names[s] for s in value) for what, value in lane.told if what == "follow"]
    used = [p for what, value in lane.told if what == "uses" for p in value]
    return engine, weights, followed, used


def once(att, model):
    model(torch.ones(1, 3)).sum().backward()


def accumulating(att, model):
    with att.no_sync():
        once(att, model)
    once(att, model)


def run(apart, backward, bucket_bytes, followed, kept):
    with pytest.MonkeyPatch.context() as patch:
        engine, weights, seen, used = trained(patch, apart, backward, bucket_bytes)
        assert seen == followed
        # Of the gradients that autograd made, and not of what has landed in their place.
        assert sorted(map(id, used)) == sorted(id(engine.made[weights[i]]) for i in kept)
        assert not any(engine.made[p] is p.grad for p in weights)


CASES = {
    "one stream": ((), once, 1, [["main"], ["main"]], ()),
    "a stream for each": ((1,), once, 1, [["side"], ["main"]], (1,)),
    "both in one bucket": ((0,), once, 1 << 20, [["main", "side"]], (0,)),
    "all on another stream": ((0, 1), once, 1 << 20, [["side"]], (0, 1)),
    "accumulated": ((1,), accumulating, 1, [["side"], ["main"]], (1,)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bucket_follows_the_streams_of_its_gradients_and_keeps_their_memory(name):
    ranks(1, run, *CASES[name])
