"""Write your own algorithm: exact diffusion, which ends at the minimum of the mean loss where plain gossip stops short.

    ψ⁺ ← x − γ g(x)                      the optimizer's step
    x  ← W̄ (ψ⁺ + x − ψ),  ψ ← ψ⁺         W̄ = (I + W)/2, W symmetric and doubly stochastic

Yuan, Ying, Zhao and Sayed 2019, arXiv:1702.05122. Only the correction x − ψ of the last step is remembered. In fp32
its rounding adds up: train with `bk.algorithms.exact_diffusion()`, which computes differences. Run it:

    torchrun --standalone --nproc_per_node=4 examples/exact_diffusion.py
"""

import os
import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

import baguakit as bk


@dataclass(frozen=True, repr=False)
class ExactDiffusion(bk.stages.Stage):
    """x ← W̄ (ψ + c);  c ← x − ψ."""

    topology: bk.topology.Topology
    elementwise: ClassVar = {"c": "zero"}  # as long as the bucket; begins anew with other ranks

    def check(self, comm):
        if not self.topology.symmetric(comm.size):
            raise ValueError(f"{self.topology!r} is not symmetric for {comm.size} ranks; use Ring() or BaseK(1)")

    def init(self, bucket, comm):
        return {"c": torch.zeros_like(bucket.flat)}

    def __call__(self, psi, state, comm):
        x = psi + state["c"]
        x = x.add_(bk.primitives.neighbor_mean_(x.clone(), self.topology, comm)).mul_(0.5)
        state["c"] = bk.stages.update_if_finite_(state["c"], x - psi, where=bk.stages.finite(x))
        return x


def exact_diffusion(topology):
    return bk.after_step(ExactDiffusion(topology))


def distance_from_minimum(rule, steps=300):
    """Return how far this rank ends from the minimum of the mean of the f_r(x) = a_r/2 ‖x − c_r‖²."""
    n, r = dist.get_world_size(), dist.get_rank()
    a, c = torch.linspace(0.5, 1.5, n, dtype=torch.float64), torch.arange(n, dtype=torch.float64)
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bk.attach(model, optimizer, rule):
        for _ in range(steps):
            optimizer.zero_grad()
            (a[r] / 2 * (model.weight - c[r]).square().sum()).backward()
            optimizer.step()
    return float((model.weight.detach() - (a * c).sum() / a.sum()).abs())


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun --standalone --nproc_per_node=4 examples/exact_diffusion.py")
    dist.init_process_group("gloo")
    ring = bk.topology.Ring()
    for name, rule in [
        ("gossip", bk.algorithms.decentralized(ring, order="atc")),
        ("exact diffusion", exact_diffusion(ring)),
    ]:
        distance = torch.tensor(distance_from_minimum(rule), dtype=torch.float64)
        dist.all_reduce(distance, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"{name:<16} ends {distance:.1e} from the minimum:  {rule}")
    dist.barrier()
    dist.destroy_process_group()
