"""Calls and tensors that gloo takes: the backend takes them, too, and gives what gloo gives."""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from bagua import flown, group, said
from pool import Pool, ranks

import baguakit as bk
from baguakit.comm.sending import all_gather_single, reduce_scatter_single

EXACT = bk.backend.Policy(None)
UINT8 = bk.backend.Policy(least=0)
POLICIES = [EXACT, UINT8]


def values(rank, n=2):
    return torch.full((n,), float(rank + 1))


def by_keywords(g, method):
    """The tensors that this rank has after a method was called with arguments by name."""
    rank, size, x = dist.get_rank(), g.size(), values(dist.get_rank())
    outs = [torch.zeros(2) for _ in range(size)]
    root, none, spare = rank == 1, [], [torch.zeros(2) for _ in range(size)]
    called = {
        "allreduce": lambda: g.allreduce([x], op=dist.ReduceOp.MAX),
        "several": lambda: g.allreduce([x, outs[0].add_(5)]),
        "broadcast": lambda: g.broadcast(x, root=1),
        "reduce": lambda: g.reduce(x, root=1, op=dist.ReduceOp.MIN),
        "gather": lambda: g.gather(outs if root else none, x, root=1),
        "scatter": lambda: g.scatter(x, [values(10 + r) for r in range(size)] if root else none, root=1),
        "allgather": lambda: g.allgather(outs, x, timeout=timedelta(seconds=60)),
        "gathers": lambda: g.allgather([[*outs, *spare], [y.clone() for y in outs * 2]], [x, x + 1]),
        "coalesced": lambda: g.allgather_coalesced([[out, out.new_zeros(3)] for out in outs], [x, values(rank, 3)]),
        "barrier": lambda: g.barrier(timeout=timedelta(seconds=60)),
    }
    called[method]().wait()
    return [each.tolist() for each in (x, *outs, *spare)]


def test_methods_take_arguments_by_name():
    def run():
        names = ["allreduce", "several", "broadcast", "reduce", "gather", "scatter", "allgather", "barrier"]
        names += ["gathers", "coalesced"]
        with group(EXACT) as g:
            for name in names:
                ours, theirs = by_keywords(g, name), by_keywords(dist.group.WORLD, name)
                if dist.get_rank() == 1 or name != "reduce":  # gloo leaves parts of the sum on the others
                    assert ours == theirs, name

    ranks(2, run)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_callback_of_a_future_may_wait_for_collectives(policy):
    """As those of DDP's PowerSGD do, while others are under way."""

    def run(policy):
        def doubled(future):
            x = future.value()[0]
            return dist.all_reduce(x, group=g, async_op=True).get_future().then(lambda again: again.value()[0]).wait()

        with group(policy) as g:
            xs = [torch.ones(1 << 20) for _ in range(4)]
            works = [dist.all_reduce(x, group=g, async_op=True) for x in xs]
            first, *others = (work.get_future() for work in works)
            then = first.then(doubled)
            return [then.wait()[0].item(), *(other.wait()[0][0].item() for other in others)]

    assert ranks(2, run, policy) == [[4, 2, 2, 2]] * 2


def test_tensors_with_gaps_are_refused_where_gloo_mixes_up_their_values():
    def run():
        with group(EXACT) as g:

            def gaps(factor):
                return (torch.arange(24.0) * factor).view(6, 4).t()[::2]

            rank, x, out = dist.get_rank(), torch.ones(2, 6), torch.zeros(2, 6)
            for call in (
                lambda: dist.all_reduce(gaps(1), group=g),
                lambda: dist.all_reduce(torch.ones(1).expand(4), group=g),
                lambda: dist.broadcast(gaps(1), 1, group=g),
                lambda: dist.reduce(gaps(1), 0, group=g),
                lambda: dist.reduce_scatter(out, [gaps(1), gaps(2)], group=g),
                lambda: dist.scatter(gaps(1), [x, x] if rank == 0 else None, 0, group=g),
            ):
                with pytest.raises(ValueError, match="gloo mixes up the values of a tensor"):
                    call()
            whole, several = torch.arange(24.0).view(6, 4).t() * (rank + 1), gaps(rank + 1)
            dist.all_reduce(whole, group=g)  # transposed on all ranks: without gaps
            g.allreduce_coalesced([several]).wait()
            assert torch.equal(whole, torch.arange(24.0).view(6, 4).t() * 3)
            assert torch.equal(several, gaps(3))
        return True

    assert ranks(2, run) == [True] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_what_gloo_refuses_is_refused_at_the_call_and_the_group_lives_on(policy):
    def run(policy):
        with group(policy) as g:
            x, second = torch.ones(10), dist.BroadcastOptions()
            second.rootTensor = 1
            said_of = {
                "no tensors": said(lambda: g.allreduce_coalesced([])),
                "rows": said(lambda: dist.all_to_all_single(torch.zeros(10), x, group=g)),
                "splits": said(lambda: dist.all_to_all_single(torch.zeros(9), x[:9], [3, 3, 3], [4, 4, 4], group=g)),
                "dtype": said(lambda: dist.broadcast(x.short(), 0, group=g)),
                "room": said(lambda: g.allgather([[x, x]], [x])),
                "rows of several": said(lambda: g.allgather_coalesced([[x]], [x, x])),
                "root": said(lambda: g.broadcast([x], second)),
                "shard": said(lambda: dist.reduce_scatter(x[:3], [x, x, x], group=g)),
            }
            assert all(said_of.values()), said_of
            assert "requires non-empty tensor list" in said_of["no tensors"]
            assert "10 rows cannot be split among 3 ranks; give output_split_sizes" in said_of["rows"]
            assert "9 rows cannot be split among 3 ranks as [4, 4, 4]" in said_of["splits"]
            dist.all_reduce(x, group=g)
            return x[0].item()

    assert ranks(3, run, policy) == [3.0] * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_sparse_tensors_are_exact(policy):
    def run(policy):
        rank = dist.get_rank()

        def gradient(g):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Embedding(100, 8, sparse=True), torch.nn.Flatten())
            ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=g)
            (ddp(torch.tensor([[1, 2], [3, 4]]) + rank).sum() * (rank + 1)).backward()
            return model[0].weight.grad.coalesce().to_dense()

        with group(policy) as g:
            assert torch.equal(gradient(g), gradient(dist.group.WORLD))
            x = torch.eye(300).to_sparse()
            _, rows = flown(lambda: dist.all_reduce(x, group=g))
            assert torch.equal(x.to_dense(), 2 * torch.eye(300))
            return list(rows)

    why = "not in the policy" if policy is EXACT else "sparse"
    assert ranks(2, run, policy) == [[("all_reduce", "exact", why)]] * 2


def test_tensors_of_inference_mode():
    """One made in inference mode is written to inside and outside of it; later work has ordinary tensors."""

    def run():
        with group(UINT8) as g:
            with torch.inference_mode():
                made = [torch.ones(600) for _ in range(4)]
                dist.all_reduce(made[0], group=g)
                reduce_scatter_single(made[1][:300], made[0], group=g)
            for x in made[2:]:
                all_gather_single(x, made[0][:300], group=g)
            dist.all_to_all_single(made[3], made[0], group=g)
            ordinary = torch.ones(600)
            with torch.inference_mode():
                dist.all_reduce(ordinary, group=g)
            dist.all_reduce(ordinary, group=g)
            return ordinary[0].item(), [x[0].item() for x in made]

    assert ranks(2, run) == [(4.0, [2.0, 4.0, 2.0, 2.0])] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_join_with_uneven_inputs(policy):
    """DDP keeps the work of an all-reduce in C++ alone, and waits for it in the backward."""

    def run(policy):
        def trained(g, initial):
            found, rank = [], dist.get_rank()
            torch.manual_seed(0)
            ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 5, bias=False), process_group=g)
            with ddp.join(divide_by_initial_world_size=initial):
                for _ in range(2 + 2 * rank):
                    ddp(torch.ones(1, 5)).sum().backward()
                    found.append(next(ddp.parameters()).grad[0, 0].item())
                    ddp.zero_grad()
            return found

        with group(policy) as g:
            return trained(g, False), trained(g, True)

    assert ranks(2, run, policy) == [([1.0] * 2, [1.0] * 2), ([1.0] * 4, [1.0, 1.0, 0.5, 0.5])]


BITS = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 float8_e4m3fn"


def test_comm_moves_values_of_any_dtype():
    def run(names):
        comm = bk.Comm()
        for dtype in (getattr(torch, name) for name in names.split()):
            theirs, x = ((torch.arange(4.0) + rank).to(dtype) for rank in (1, comm.rank))
            both = torch.cat([(torch.arange(4.0) + rank).to(dtype) for rank in (0, 1)])
            assert torch.equal(comm.all_gather(x).float(), both.float()), dtype
            assert torch.equal(comm.all_gather(x.view(2, 2)).float(), both.view(4, 2).float()), dtype
            comm.broadcast(x[3], 1)
            assert x[3].float() == theirs[3].float(), dtype
            assert torch.equal(comm.broadcast(x, 1).float(), theirs.float()), dtype

    ranks(2, run, BITS)


def compiled():
    """DDP and collectives under `torch.compile`, with breaks between graphs."""
    found = []
    warnings.simplefilter("ignore")  # torch's tracer knows no BroadcastOptions
    with group(UINT8) as g:
        for more in ([], [torch.nn.BatchNorm1d(8)]):
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), *more)
            ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=g)
            step = torch.compile(ddp, backend="eager")
            for _ in range(2):
                step(torch.ones(4, 8)).sum().backward()
            torch._dynamo.reset()

        @torch.compile(backend="eager")
        def shared(x):
            dist.broadcast(x, group_src=0, group=g)
            dist.barrier(group=g)
            return x + 1

        @torch.compile(backend="eager", fullgraph=True)
        def summed(x):
            dist.all_reduce(x, group=g)
            return x + 1

        for function in (shared, summed):
            found += function(torch.ones(4)).tolist()[:1]
    return found


@pytest.mark.slow  # the compiler is imported, and traces
def test_compiled_programs():
    with Pool(2) as pool:
        assert pool.run(compiled) == [[2.0, 3.0]] * 2
