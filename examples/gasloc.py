"""Write your own algorithm: GASLoC, local steps and then an accelerated gossip step between neighbours.

For θ_r the weights of rank r after an exchange, x_r those after H local steps from θ_r, W the mixing matrix, η the
outer learning rate and μ the outer momentum:

    y ← θ + η (x − θ)
    θ ← W (y + μ (y − y before)),   x ← θ        y before = θ in the first round

On the complete graph, W = 11ᵀ/n, all ranks agree, and this is DiLoCo: `diloco(H, lr=η, momentum=μ, nesterov=True)`.
With η = 1 and μ = 0 it is decentralized local SGD, x ← W x after every H-th step.

Cagnasso, Belilovsky and Oyallon 2026, arXiv:2606.11081, as far as second-hand accounts tell. One of them has the
momentum outside, θ ← W y + μ (y − y before); then ranks do not agree on the complete graph, where the paper claims
DiLoCo: so this is the form with that property. Without gradients a disagreement in the direction of an eigenvalue λ of
a symmetric W grows unless λ > −1/(1 + 2μ): a ring takes any μ < 1, other graphs less. Run it:

    torchrun --standalone --nproc_per_node=4 examples/gasloc.py
"""

import os
import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

import baguakit as bk


@dataclass(frozen=True, repr=False)
class OuterGossip(bk.stages.Stage):
    """y ← θ + η (x − θ);  θ ← W (y + μ (y − y before));  x ← θ,  for η = `lr` and μ = `momentum`."""

    topology: bk.topology.Topology
    lr: float = 0.7
    momentum: float = 0.9
    elementwise: ClassVar = {"theta": "keep", "c": "mean"}  # c = y before − θ

    def check(self, comm):
        bk.stages.NeighborMean(self.topology).check(comm)

    def init(self, bucket, comm):
        theta = bucket.flat.clone()
        return {"theta": theta, "c": torch.zeros_like(theta)}

    def __call__(self, x, state, comm):
        theta, c = state["theta"], state["c"]
        y = x + (1 - self.lr) * (theta - x)  # x to the bit for η = 1
        mixed = bk.primitives.neighbor_mean_(y + self.momentum * (y - theta - c), self.topology, comm)
        ok = bk.stages.finite(mixed)
        state["c"] = bk.stages.update_if_finite_(c, y - mixed, where=ok)
        state["theta"] = bk.stages.update_if_finite_(theta, mixed, where=ok)
        return mixed


def gasloc(topology, every=500, lr=0.7, momentum=0.9):
    return bk.after_step(OuterGossip(topology, lr, momentum), every=every)


def distances(rule, steps=400):
    """Return how far the mean of the ranks ends from the minimum of the mean of the ‖x − r‖²/2, and they from it."""
    n, r = dist.get_world_size(), dist.get_rank()
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with bk.attach(model, optimizer, rule) as att:
        for _ in range(steps):
            optimizer.zero_grad()
            ((model.weight - r).square().sum() / 2).backward()
            optimizer.step()
        apart = float(att.consensus_distance())
        att.merge()
    return float((model.weight.detach() - (n - 1) / 2).abs()), apart


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun --standalone --nproc_per_node=4 examples/gasloc.py")
    dist.init_process_group("gloo")
    ring = bk.topology.Ring()
    for name, rule in [
        ("local SGD on a ring", bk.algorithms.decentralized(ring, order="atc", every=10)),
        ("GASLoC on a ring", gasloc(ring, every=10)),
    ]:
        distance, apart = distances(rule)
        if dist.get_rank() == 0:
            print(f"{name:<20} ends {distance:.1e} from the minimum, ranks {apart:.1e} apart:  {rule}")
    dist.barrier()
    dist.destroy_process_group()
