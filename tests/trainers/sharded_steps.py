"""Optimizers with the collectives of those of nanochat and modded-nanogpt, in our own words and without kernels."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

AVG = dist.ReduceOp.AVG
SMALL = 1024  # values: smaller parameters are all-reduced


def orthogonal(x: Tensor) -> Tensor:
    """Return the nearest matrices with orthogonal rows or columns, which Muon's iteration approximates."""
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u @ v


def future_of(work):
    """Return the future that both programs wait for; some works of gloo have none."""
    try:
        return work.get_future()
    except RuntimeError:
        return work


class Stacked(torch.optim.Optimizer):
    """The steps of nanochat: groups of `kind` "muon" have matrices of one shape, which are averaged as one stack.

    All reductions are launched first. Each group is stepped when its own has landed, and its gather is waited for last.
    """

    def __init__(self, groups, group=None):
        super().__init__(groups, {"lr": 0.02})
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    @torch.no_grad()
    def step(self):
        launched = [
            (self.reduce_stack if g["kind"] == "muon" else self.reduce_rows)(g["params"]) for g in self.param_groups
        ]
        gathers = []
        for group, reduced in zip(self.param_groups, launched, strict=True):
            step = self.step_stack if group["kind"] == "muon" else self.step_rows
            gathers += step(group, reduced)
        for future, copy in gathers:
            future.wait()
            copy()

    def reduce_stack(self, params):
        each = -(-len(params) // self.size)  # matrices of a rank; the last may own fewer
        stack = torch.zeros(each * self.size, *params[0].shape)
        stack[: len(params)] = torch.stack([p.grad for p in params])
        own = torch.empty(each, *params[0].shape)
        return self.scatter(own, stack), own, stack

    def step_stack(self, group, reduced):
        future, own, stack = reduced
        future.wait()
        params = group["params"]
        held = params[self.rank * len(own) :][: len(own)]
        state = self.state[params[0]]
        momentum = state.setdefault("momentum", torch.zeros_like(own))
        momentum.lerp_(own, 0.1)
        new = torch.zeros_like(own)
        if held:
            new[: len(held)] = torch.stack(list(held)) - group["lr"] * orthogonal(momentum[: len(held)])
        return [(self.gather(stack, new), lambda: [p.copy_(x) for p, x in zip(params, stack, strict=False)])]

    def reduce_rows(self, params):
        found = []
        for p in params:
            if p.numel() < SMALL:
                work = dist.all_reduce(p.grad, op=AVG, group=self.group, async_op=True)
                found.append((future_of(work), p.grad))
            else:
                own = torch.empty_like(p.grad[: len(p) // self.size])
                found.append((self.scatter(own, p.grad), own))
        return found

    def step_rows(self, group, reduced):
        gathers = []
        for p, (future, own) in zip(group["params"], reduced, strict=True):
            future.wait()
            rows = p if p.numel() < SMALL else p[self.rank * len(own) :][: len(own)]
            state = (
                self.state[p].setdefault("mean", torch.zeros_like(own)),
                self.state[p].setdefault("square", torch.zeros_like(own)),
            )
            state[0].lerp_(own, 0.1)
            state[1].lerp_(own.square(), 0.05)
            rows -= group["lr"] * state[0] / (state[1].sqrt() + 1e-8)
            if rows is not p:
                gathers.append((self.gather(p, rows), lambda: None))
        return gathers

    def scatter(self, own, x):
        return future_of(dist.reduce_scatter_tensor(own, x, op=AVG, group=self.group, async_op=True))

    def gather(self, out, x):
        return future_of(dist.all_gather_into_tensor(out, x, group=self.group, async_op=True))


@dataclass
class Banked:
    """The steps of modded-nanogpt: a bank of bf16 weights with 16 lower bits, and an embedding of few rows in a batch.

    Launches go in one order and steps in another. The rows of the embedding's gradient go to the ranks that own them.
    """

    bank: nn.Parameter  # bf16 (matrices, rows, columns)
    table: nn.Parameter  # fp32 (tokens, width)
    group: object = None
    lower: Tensor = field(init=False)  # the lower 16 bits of the weights that this rank owns

    def __post_init__(self):
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.lower = torch.zeros_like(self.own(self.bank), dtype=torch.int32)

    def own(self, x):
        each = len(x) // self.size
        return x.detach()[self.rank * each :][:each]

    def exact(self):
        """The fp32 weights of this rank: the bits of bf16, and the lower ones."""
        return ((self.own(self.bank).view(torch.int16).to(torch.int32) << 16) | self.lower).view(torch.float32)

    @torch.no_grad()
    def step(self, tokens, lr=0.02):
        indices, values = self.share_rows(tokens)
        own = torch.empty_like(self.own(self.bank))
        bank = future_of(dist.reduce_scatter_tensor(own, self.bank.grad, op=AVG, group=self.group, async_op=True))
        # The embedding was launched first, and is stepped last.
        bank.wait()
        new = (self.exact() - lr * orthogonal(own.float())).view(torch.int32)
        self.lower = new & 0xFFFF
        upper = (new >> 16).to(torch.int16).view(torch.bfloat16)
        gathers = [future_of(dist.all_gather_into_tensor(self.bank, upper, group=self.group, async_op=True))]
        for future in values[1]:
            future.wait()
        rows = (
            self.own(self.table.grad).clone().index_add_(0, indices - self.rank * len(self.own(self.table)), values[0])
        )
        mine = self.own(self.table) - lr * rows / self.size
        gathers.append(future_of(dist.all_gather_into_tensor(self.table, mine, group=self.group, async_op=True)))
        for future in gathers:
            future.wait()

    def share_rows(self, tokens):
        """Send each rank the rows of the gradient that it owns; return the rows' numbers, and (values, futures)."""
        each, width = len(self.table) // self.size, self.table.shape[1]
        rows = tokens.unique()
        rows = rows[rows // each != self.rank]
        there = torch.bincount(rows // each, minlength=self.size)
        here = torch.empty_like(there)
        future_of(dist.all_to_all_single(here, there, group=self.group, async_op=True)).wait()
        there, here = there.tolist(), here.tolist()
        came = torch.empty(sum(here), dtype=torch.int64)
        first = future_of(dist.all_to_all_single(came, rows, here, there, group=self.group, async_op=True))
        values = torch.empty(sum(here) * width)
        sizes = [n * width for n in here], [n * width for n in there]
        sent = self.table.grad[rows].view(-1)
        second = future_of(dist.all_to_all_single(values, sent, *sizes, group=self.group, async_op=True))
        first.wait()
        return came, (values.view(-1, width), [second])
