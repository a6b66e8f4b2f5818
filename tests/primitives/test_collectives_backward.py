"""Collectives with a backward: their gradients are those of the sum over ranks, and each pass has its compressor."""

import pytest
import torch
from pool import ranks
from tiers import slow_after

import baguakit as bk

OPERATIONS = ["all_gather", "reduce_scatter", "all_to_all", "all_to_all, unequal", "all_reduce"]


def flown(through, name, x, rank, n):
    """The result of an operation on `x`, (2 n, 3) on rank `rank` of `n`."""
    if name != "all_to_all, unequal":
        return getattr(through, name)(x)
    rows = [[(q + r) % 3 for r in range(n)] for q in range(n)]  # from q to r
    padding = torch.zeros(sum(rows[rank]), 3, dtype=x.dtype) + x.sum() / 3
    return through.all_to_all(x[:1] * padding, [rows[q][rank] for q in range(n)], rows[rank])


@pytest.mark.parametrize("n", slow_after(1, (2, 3, 4, 5)))
@pytest.mark.parametrize("name", slow_after(2, OPERATIONS))
def test_gradients_are_those_of_the_sum_over_ranks(name, n):
    """Of a function of all ranks' values that all ranks compute together, on each of them: gradcheck in float64."""

    def run():
        comm = bk.Comm()
        exact = bk.primitives.Differentiable(comm)
        weight = torch.linspace(-1, 1, 64 * 3, dtype=torch.float64).view(64, 3) * (comm.rank + 1)

        def function(every):
            mine = exact.identity(every)[comm.rank]
            out = flown(exact, name, mine.sin(), comm.rank, n)
            if name == "all_reduce":  # alike on all ranks: it counts once
                return (out.cos() * weight[: len(out)] / (comm.rank + 1)).sum()
            return exact.all_reduce((out.cos() * weight[: len(out)]).sum().view(1))

        every = torch.randn(n, 2 * n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        every.requires_grad_()
        torch.manual_seed(0)  # gradgradcheck draws the gradients of outputs: alike on all ranks, as the outputs are
        return torch.autograd.gradcheck(function, every) and torch.autograd.gradgradcheck(function, every)

    assert ranks(n, run) == [True] * n


@pytest.mark.parametrize("name", OPERATIONS[:3])
def test_each_pass_has_its_compressor(name):
    """And what they make is what the primitives do: straight-through."""

    def run():
        back = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "all_to_all"}[name]
        byte, half, found = bk.compressors.MinMaxUInt8(), bk.compressors.UInt4(), []
        for forward, backward in ((byte, half), (byte, None), (None, half), (None, None)):
            comm, sent = bk.Comm(), {}
            generator = torch.Generator().manual_seed(comm.rank)
            x = torch.randn(4, 300, generator=generator, requires_grad=True)
            through = bk.primitives.Differentiable(comm, forward, backward)
            out = getattr(through, name)(x)
            grad = torch.randn(out.shape, generator=generator)
            out.backward(grad)
            with torch.no_grad():
                expected = getattr(bk.primitives, f"compressed_{name}")(x, forward, comm.for_flight(0, 0, 0, sent))
                gradient = getattr(bk.primitives, f"compressed_{back}")(grad, backward, comm.for_flight(0, 0, 0, sent))
            found.append(torch.equal(out, expected) and torch.equal(x.grad, gradient))
            found.append(sent == {"flat": through.bytes_sent})
        return found

    assert ranks(2, run) == [[True] * 8] * 2


def compiled(backend):
    """Compare a compiled block with the same one uncompiled, for several lengths; return the largest difference."""
    byte, comm = bk.compressors.MinMaxUInt8(), bk.Comm()
    through = bk.primitives.Differentiable(comm, byte, byte)
    n, rank = comm.size, comm.rank

    def block(x, output, input):
        x = through.identity(x).sin()
        x = through.reduce_scatter(through.all_gather(x)) + through.all_to_all(x)
        return through.all_reduce(through.all_to_all(x, output, input).cos().sum(0)).sum()

    fast, worst = torch.compile(block, fullgraph=True, backend=backend, dynamic=True), 0.0
    for rows in (6, 12, 18):
        splits = [[rows // n] * n, [rows // n] * n]
        if rows == 18:  # nothing from rank 0 to the last
            splits[0][0] -= rows // n * (rank == n - 1)
            splits[1][n - 1] -= rows // n * (rank == 0)
            splits[1][0] += rows // n * (rank == 0)
            splits[0][0] += rows // n * (rank == 0)
        results = []
        for function in (fast, block):
            x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            y = function(x, *splits)
            y.backward()
            results.append(torch.cat([y.detach().view(1), x.grad.flatten()]))
        worst = max(worst, float((results[0] - results[1]).abs().max() / results[1].abs().max()))
    return worst


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_graph_holds_them_whole(backend):
    """`fullgraph=True`: forward and backward, for lengths and splits that change. Fused arithmetic rounds otherwise."""
    assert all(worst < 1e-2 for worst in ranks(2, compiled, backend))


def test_operators_keep_the_promises_of_operators():
    """Schema, fake and autograd, as torch checks them."""

    def run():
        import warnings

        from baguakit.primitives import differentiable as d

        # The check reads .grad of what is no leaf, and torch hides only the message of that warning, which is an error.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        through = bk.primitives.Differentiable(bk.Comm())
        x, name = torch.randn(4, 3, requires_grad=True), through._name
        calls = [
            (x, operation, 1, splits, splits, name, True)
            for operation in d.BACKWARD
            for splits in ([[4]] if operation == "all_to_all" else [[]])
        ]
        return [set(torch.library.opcheck(d._collective, call).values()) for call in calls]

    assert ranks(1, run) == [[{"SUCCESS"}] * 5]


def test_what_they_are_made_of_is_checked():
    def run():
        said = []
        for arguments in ((None,), (bk.Comm(), bk.compressors.TopK(0.1)), (bk.Comm(), None, "uint8")):
            try:
                bk.primitives.Differentiable(*arguments)
            except TypeError as error:
                said.append(str(error))
        return said

    (said,) = ranks(1, run)
    expected = ["comm is a bk.Comm", "forward TopK(0.1", "backward is a compressor"]
    assert [words in sentence for words, sentence in zip(expected, said, strict=True)] == [True] * 3
