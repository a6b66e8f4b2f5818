"""Two equal sets of small parameters, gradients for both, and an optimizer for each: fused and plain."""

from types import SimpleNamespace

import torch
from torch import nn

from baguakit.optim import fuse
from baguakit.optim.fusion import fusion_of

LASTING = 15  # steps: more than the same must be absent before a group is laid out again
SHAPES = [(7,), (5, 3), (33,), (), (1,), (4, 2, 3), (16,), (2, 3, 4, 4), (3, 70), (9, 1)]


def parameters(dtype=torch.float32, seed=0):
    """Small parameters, a scalar and one in channels_last among them."""
    draw = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES]
    return [nn.Parameter(x.to(memory_format=torch.channels_last) if x.dim() == 4 else x) for x in made]


def groups(params):
    """Two groups with options of their own."""
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.003, "weight_decay": 0.05}]


def plain_groups(params):
    """As `groups`, for optimizers without a weight decay."""
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.003}]


class Gradients:
    """The gradients of step after step. With `absent`, some have none, others after every `LASTING` steps.

    At the first step all have one: torch's fused SGD fails where some parameters have a momentum and others have none.
    """

    def __init__(self, absent=True, seed=1):
        self.draw, self.absent, self.steps, self.gone = torch.Generator().manual_seed(seed), absent, 0, []

    def give(self, *sets):
        missing = torch.rand(len(sets[0]), generator=self.draw) < 0.05
        start = int(torch.randint(0, 30, (), generator=self.draw)) % 10
        if self.absent and self.steps % LASTING == 1:
            self.gone = [i for i, each in enumerate(missing.tolist()) if each or start <= i < start + 3]
        self.steps += 1
        for i, alike in enumerate(zip(*sets, strict=True)):
            g = torch.randn(alike[0].shape, generator=self.draw).to(alike[0].dtype)
            for p in alike:
                p.grad = None if i in self.gone else torch.empty_like(p).copy_(g)


def pair(kind=torch.optim.AdamW, **options):
    """Two equal sets, and their optimizers: the first fused, the second plain."""
    ours, theirs = parameters(), parameters()
    return ours, theirs, fuse(kind(groups(ours), **options)), kind(groups(theirs), **options)


def train(steps, gradients, ours, theirs, *optimizers):
    """Step all optimizers with the same gradients."""
    for _ in range(steps):
        gradients.give(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()


def same_state(a, b):
    """Return whether two optimizers have bitwise equal state dicts, types and shapes included."""
    a, b = a.state_dict(), b.state_dict()
    return alike(a, b)


def alike(a, b):
    if isinstance(a, torch.Tensor):
        same_kind = isinstance(b, torch.Tensor) and (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        return same_kind and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and a == b


def equal(a, b):
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def report(optimizer):
    """Return what the latest step of a fused optimizer did: flat tensors, and how many parameters went which way."""
    layouts = fusion_of(optimizer).layouts
    flats = [flat for layout in layouts for flat in layout.flats]
    present = [given for layout in layouts for given in layout.present]
    together = sum(len(flat.params) for flat in flats)
    return SimpleNamespace(
        layouts=layouts, flats=len(flats), together=together, absent=present.count(False),
        apart=present.count(True) - together,
    )  # fmt: skip
