"""Time of a step of many small tensors, fused and not, when all have a gradient and when only some do.

    pytest --benchmark bench/bench_optim.py --benchmark-json optim.json

Ideal line: the same optimizer on one parameter with as many values, whose gradient lies where it should.
"""

import gc
from time import perf_counter

import pytest
import torch
from torch import nn

from baguakit.optim import fuse

TENSORS = 1000
ROUNDS = 15
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CODE = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
HAVE_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def parameters(sizes, device):
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, generator=draw).to(device)) for n in sizes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=draw).to(device)
    return params


def seconds(step, device):
    begun = perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - begun


def interleaved(steps, device):
    """The median time of each of several steps, taken in turns, so that what else the machine does hits all alike."""
    taken = {name: [] for name in steps}
    gc.disable()
    for round in range(-3, ROUNDS):
        for name, step in steps.items():
            spent = seconds(step, device)
            if round >= 0:
                taken[name].append(spent)
    gc.enable()
    return {name: sorted(times)[ROUNDS // 2] for name, times in taken.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [100, 1000, 8000])
@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam], ids=lambda kind: kind.__name__
)
def bench_step(benchmark, kind, size, device):
    """1,000 tensors of `size` values: torch's loop, foreach and fused code, each as it is and after `fuse`."""
    steps, weights = {}, {}
    for code, options in CODE.items():
        if code == "fused" and kind not in HAVE_FUSED:
            continue
        for prepare in (lambda optimizer: optimizer, fuse):
            params = parameters([size] * TENSORS, device)
            momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
            optimizer = prepare(kind(params, lr=1e-3, **momentum, **options))
            name = f"bk.optim.fuse, {code}" if prepare is fuse else f"torch, {code}"
            steps[name], weights[name] = optimizer.step, params
    one = parameters([size * TENSORS], device)
    steps["one tensor"] = kind(one, lr=1e-3, foreach=False).step
    median = interleaved(steps, device)
    for code in CODE:
        if f"torch, {code}" in steps and code != "fused":
            pairs = zip(weights[f"torch, {code}"], weights[f"bk.optim.fuse, {code}"], strict=True)
            assert all(torch.equal(p, q) for p, q in pairs)
    fused = median["bk.optim.fuse, foreach"]
    ratio = median["torch, foreach"] / fused
    beside = f"{ratio:.2f} times as fast as torch, foreach; one tensor: {median['one tensor'] / fused:.2f}"
    benchmark.extra_info.update(median | {"beside": beside})
    print(f"\n{kind.__name__}, {TENSORS} tensors of {size} values on {device}:")
    for name, spent in median.items():
        plain = median.get(name.replace("bk.optim.fuse", "torch"), spent)
        gain = f"  {plain / spent:5.2f} times as fast" if plain is not spent else ""
        print(f"  {name:24} {spent * 1e3:8.2f} ms{gain}")
    benchmark.pedantic(steps["bk.optim.fuse, foreach"], rounds=3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("absent", ["none", "a layer in ten", "one in ten"])
@pytest.mark.parametrize("where", ["anywhere", "in a bucket"])
def bench_gradients(benchmark, where, absent, device):
    """AdamW, 1,000 tensors of 1,000 values: gradients anywhere or in a bucket; where others are absent, one by one."""
    steps = {}
    for name, prepare in {"torch": lambda optimizer: optimizer, "bk.optim.fuse": fuse}.items():
        params = parameters([1000] * TENSORS, device)
        if where == "in a bucket":
            bucket = torch.cat([p.grad for p in reversed(params)])
            for p, view in zip(reversed(params), bucket.split(1000), strict=True):
                p.grad = view
        steps[name] = losing(prepare(torch.optim.AdamW(params, foreach=False)).step, params, absent)
    median = interleaved(steps, device)
    median["ratio"] = median["torch"] / median["bk.optim.fuse"]
    benchmark.extra_info.update(median | {"beside": f"{median['ratio']:.2f} times as fast as torch's loop"})
    print(f"\ngradients {where}, {absent} absent, {device}: {median}")
    benchmark.pedantic(steps["bk.optim.fuse"], rounds=3)


def losing(step, params, absent):
    """`step`, with other gradients missing each time."""
    draw = torch.Generator().manual_seed(0)
    grads = [p.grad for p in params]

    def lossy():
        missing = torch.zeros(len(params), dtype=torch.bool)
        if absent == "a layer in ten":
            missing = (torch.rand(len(params) // 10, generator=draw) < 0.1).repeat_interleave(10)
        elif absent == "one in ten":
            missing = torch.rand(len(params), generator=draw) < 0.1
        for p, grad, gone in zip(params, grads, missing.tolist(), strict=True):
            p.grad = None if gone else grad
        step()

    return lossy


def bench_fuse(benchmark):
    """Time `fuse` itself, with 1 and with 50 groups."""
    for n in (1, 50):
        params = parameters([10] * 100, "cpu")
        grouped = [{"params": params[i::n]} for i in range(n)]
        print(f"\n{n} groups: {seconds(lambda: fuse(torch.optim.AdamW(grouped)), 'cpu') * 1e3:.1f} ms")  # noqa: B023
    benchmark(lambda: fuse(torch.optim.AdamW(parameters([10] * 100, "cpu"))))
