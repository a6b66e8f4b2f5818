"""A thousand small tensors, stepped as a few flat ones: the same numbers, sooner.

Run it:

    python examples/fused_optimizer.py
"""

import time

import torch

import baguakit as bk


def parameters() -> list[torch.nn.Parameter]:
    """A thousand tensors of a hundred values, with gradients."""
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(100)) for _ in range(1000)]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def seconds(optimizer: torch.optim.Optimizer, steps: int = 50) -> float:
    """The median time of a step."""
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return sorted(times)[steps // 2]


if __name__ == "__main__":
    torch.set_num_threads(1)
    plain, flat = parameters(), parameters()
    apart = seconds(torch.optim.AdamW(plain, lr=1e-3))
    together = seconds(bk.optim.fuse(torch.optim.AdamW(flat, lr=1e-3)))
    assert all(torch.equal(p, q) for p, q in zip(plain, flat, strict=True))
    print(f"a step of AdamW: {apart * 1e3:.2f} ms, fused {together * 1e3:.2f} ms, to the same weights")
