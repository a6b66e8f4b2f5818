"""Values of which chunks keep the largest, and which these are."""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAN, INFINITY = float("nan"), float("inf")


def drawn(rows: int, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values of many scales; half of them come from a few, so that the threshold has equals."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=source) * 10 ** torch.randn(rows, n, generator=source)
    few = torch.randint(-3, 4, (rows, n), generator=source).float()
    return torch.where(torch.rand(rows, n, generator=source) < 0.5, few, x).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().nan_to_num(12345.0), b.cpu().nan_to_num(12345.0))


def by_sorting(row: list[float], k: int) -> list[int]:
    """The definition in the words of Python: by magnitude, NaN above all, then by place."""
    order = sorted(
        range(len(row)), key=lambda i: (-INFINITY if row[i] != row[i] else -abs(row[i]), row[i] == row[i], i)
    )
    return sorted(order[:k])
