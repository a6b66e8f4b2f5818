"""Values that kernels get wrong first, and the comparison of results to the bit."""

import torch
from formats import sample, without_nan

KINDS = ("many scales", "broken", "subnormal", "constant", "largest", "ties")


def hostile(kind: str, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return `n` values of a kind.

    many scales: with zeros of both signs, and a run of one value
    broken: NaN, infinities of both signs, the last value among them, and blocks without any
    subnormal: of the dtype, or fp32 if it is wider; of both signs, some of them just normal
    constant: runs of one value: ordinary, zeros of both signs, subnormal, the largest
    largest: of the dtype, or fp32 if it is wider; of both signs, so that differences overflow
    ties: whole numbers and halves
    """
    facts = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    source = torch.Generator().manual_seed(seed)
    if kind == "many scales":
        x = sample(1, n, torch.float32, seed)[0]
    elif kind == "broken":
        x = sample(1, n, torch.float32, seed)[0]
        x[5::1031], x[600::2048], x[-1] = torch.inf, torch.nan, -torch.inf
    elif kind == "subnormal":
        x = torch.linspace(-1.5, 1.5, n).double() * facts.tiny
    elif kind == "constant":
        runs = torch.tensor([-3.25, facts.tiny / 4, 0.0, facts.max, -0.0, -facts.tiny / 4, facts.min, 1.0]).double()
        x = runs[torch.arange(n) // 700 % len(runs)]
    elif kind == "largest":
        x = torch.where(torch.rand(n, generator=source) < 0.5, facts.max, facts.min).double()
        x[::5] = 1.0
    else:
        x = torch.randint(-600, 600, (n,), generator=source) / 2
    return x.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes, where one NaN is as good as another."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        *(without_nan(each).reshape(-1).view(torch.uint8) for each in (a, b))
    )


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """Name the first value that differs, for the message of an assertion."""
    if same(ours, theirs):
        return ""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{ours.shape} {ours.dtype} in place of {theirs.shape} {theirs.dtype}"
    ours, theirs = ours.reshape(-1), theirs.reshape(-1)
    at = next(i for i in range(len(ours)) if not same(ours[i], theirs[i]))
    return f"{ours[at].item()!r} in place of {theirs[at].item()!r}, value {at} of {len(ours)}"
