"""Every method by which torch moves tensors in a process group: it flies as the policy says, and is right."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from bagua import flown, group
from pool import ranks

import baguakit as bk
from baguakit.backend.group import BaguaGroup
from baguakit.backend.methods import Methods
from baguakit.lanes.base import tensors_in

# Methods of a process group that move no tensors.
OTHERS = {
    *("BackendType", "abort", "bound_device_id", "boxed", "get_group_store", "group_desc", "group_name"),
    *("merge_remote_group", "monitored_barrier", "name", "rank", "set_timeout", "shutdown", "size", "split_group"),
    *("unbox", "use_pg_for_symm_mem_rendezvous"),
    # of torch 2.14
    *(
        "get_backend",
        "get_reconfigure_handle",
        "new_window",
        "reconfigure",
        "register_abort_hook",
        "register_post_hook",
    ),
    *("register_pre_hook", "supports_reconfigure", "supports_window", "unregister_abort_hook", "unregister_post_hook"),
    "unregister_pre_hook",
}
UInt8 = "MinMaxUInt8()"
N = 600  # values of a rank


def test_no_method_that_moves_tensors_is_left_to_torch():
    """One that a newer torch adds fails here: add it to the backend, or to `OTHERS`."""
    public = {name for name in dir(dist.ProcessGroup) if not (name.startswith("_") or name.isupper())}
    moving = public - OTHERS
    private = {"_allgather_base", "_reduce_scatter_base"} & set(dir(dist.ProcessGroup))
    own = {name for kind in BaguaGroup.__mro__[: BaguaGroup.__mro__.index(dist.ProcessGroup)] for name in vars(kind)}
    assert (moving | private) - own == set()


def given(kind, op=None):
    options = getattr(dist.distributed_c10d, kind)()
    if op is not None:
        options.reduceOp = op
    return options


def calls(g, x, op=dist.ReduceOp.SUM):
    """Return {method: (operation, a call of it, its result, the exact result)}, by this torch's names."""
    n, rank = g.size(), g.rank()
    everyone = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(everyone, x, group=dist.group.WORLD)
    total = sum(each.double() for each in everyone) / (n if op == dist.ReduceOp.AVG else 1)
    shard, all_values = total.view(n, -1)[rank], torch.cat(everyone)
    swapped = torch.cat([each.view(n, -1)[rank] for each in everyone])
    y, out, row, rows = x.clone(), x.repeat(n), total.new_empty(x.numel() // n).to(x.dtype), list(x.chunk(n))
    outs = [torch.empty_like(x) for _ in range(n)]
    to, scatter, gather = given("AllreduceOptions", op), given("ReduceScatterOptions", op), given("AllgatherOptions")
    coalesced = given("AllreduceCoalescedOptions", op)
    landed, sizes = torch.empty_like(x), [x.numel() // n] * n
    parts = list(landed.chunk(n))
    single = (landed, x, [], [])
    return {
        "allreduce": ("all_reduce", ([y], to), y, total),
        "allreduce_coalesced": ("all_reduce", ([y], coalesced), y, total),
        "reduce_scatter": ("reduce_scatter", ([row], [rows], scatter), row, shard),
        "_reduce_scatter_base": ("reduce_scatter", (row, x, scatter), row, shard),
        "reduce_scatter_single": ("reduce_scatter", (row, x, scatter), row, shard),
        "reduce_scatter_tensor_coalesced": ("reduce_scatter", ([row], [x], scatter), row, shard),
        "reduce_scatter_single_coalesced": ("reduce_scatter", ([row], [x], scatter), row, shard),
        "allgather": ("all_gather", ([outs], [x], gather), outs, all_values),
        "_allgather_base": ("all_gather", (out, x, gather), out, all_values),
        "all_gather_single": ("all_gather", (out, x, gather), out, all_values),
        "allgather_coalesced": ("all_gather", ([[o] for o in outs], [x], gather), outs, all_values),
        "allgather_into_tensor_coalesced": ("all_gather", ([out], [x], gather), out, all_values),
        "all_gather_single_coalesced": ("all_gather", ([out], [x], gather), out, all_values),
        "alltoall_base": ("all_to_all", single, landed, swapped),
        "all_to_all_single": ("all_to_all", (landed, x, sizes, sizes), landed, swapped),
        "alltoall": ("all_to_all", (parts, rows), landed, swapped),
    }


def test_each_method_flies_compressed_once():
    def run():
        found = {}
        with group(bk.backend.Policy(least=0)) as g:
            torch.manual_seed(dist.get_rank())
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                for dtype in (torch.float32, torch.bfloat16):
                    x = torch.randn(N).to(dtype)
                    for name in calls(g, x, op):
                        operation, arguments, result, exact = calls(g, x, op)[name]
                        work, rows = flown(lambda a=arguments, name=name: getattr(g, name)(*a).wait())
                        assert work is True
                        assert rows == {(operation, UInt8, ""): 1}, (name, rows)
                        value = torch.cat(result) if isinstance(result, list) else result
                        error = (value.double() - exact.double()).abs().max() / exact.double().abs().max()
                        assert error < 0.02, (name, op, dtype, error)  # a step of 8 bits, and bfloat16's
                        found[name, str(op), str(dtype)] = value
        return found

    first, *others = ranks(3, run)
    alike = [key for key in first if key[0] in ("allreduce", "allreduce_coalesced", "allgather", "all_gather_single")]
    assert all(torch.equal(first[key], other[key]) for key in alike for other in others)


class Recorder(Methods):
    """A group that returns its calls."""

    def _launch(self, call):
        return call


def test_a_lane_is_told_of_every_tensor_of_a_call():
    """On a GPU the memory of one that it is not told of may be handed out while the lane still reads it."""

    def run():
        missing, recorder, x = {}, Recorder(dist.get_rank(), dist.get_world_size()), torch.ones(4)
        made = {name: arguments for name, (_, arguments, *_) in calls(recorder, torch.arange(N * 1.0)).items()}
        made |= {"broadcast": ([x],), "reduce": ([x],), "gather": ([[x + 1] * 2], [x]), "scatter": ([x], [[x + 1] * 2])}
        for name, arguments in made.items():
            told = {each.data_ptr() for each in tensors_in(getattr(recorder, name)(*arguments).passed)}
            if lost := {each.data_ptr() for each in tensors_in(arguments)} - told:
                missing[name] = len(lost)
        return missing

    assert ranks(2, run) == [{}] * 2


@pytest.mark.parametrize("policy", [bk.backend.Policy(None, least=0, flows=2), bk.backend.Policy(operations=())])
def test_without_a_compressor_each_method_is_exact(policy):
    def run(policy):
        with group(policy) as g:
            x = torch.arange(N * 1.0) + dist.get_rank()  # sums of which are exact
            for name in calls(g, x):
                operation, arguments, result, exact = calls(g, x)[name]
                if not policy.operations and name == "alltoall" and not hasattr(dist, "all_gather_single"):
                    continue  # gloo has it since torch 2.13
                _, rows = flown(lambda a=arguments, name=name: getattr(g, name)(*a).wait())
                assert rows == {(operation, "exact", "over flows" if policy.operations else "not in the policy"): 1}
                value = torch.cat(result) if isinstance(result, list) else result
                assert torch.equal(value.double(), exact.double()), name

    ranks(3, run, policy)


def test_what_is_always_exact():
    def run():
        rank, size, told = dist.get_rank(), dist.get_world_size(), {}
        with group() as g:
            large, small = torch.full((1 << 15,), float(rank)), torch.full((8,), float(rank))

            def reduced(x, op=dist.ReduceOp.SUM):
                dist.all_reduce(x, op, group=g)
                return x[0].item()

            def within():
                with bk.backend.exact():
                    return reduced(large + 0.1)

            def shared():
                x = large.clone()
                dist.broadcast(x, group=g, group_src=1)
                return x[0].item()

            def gathered():
                found = [None] * size
                dist.all_gather_object(found, {"rank": rank}, group=g)
                return found

            def uneven():
                sizes = [1 << 14, 2 << 14]
                outs = [torch.zeros(size) for size in sizes]
                with pytest.raises(Exception, match=r"ize|hape"):  # gloo gathers equal sizes only
                    dist.all_gather(outs, torch.zeros(sizes[rank]), group=g)

            for name, work in {
                "integers": lambda: reduced(large.long()),
                "max": lambda: reduced(large.clone(), dist.ReduceOp.MAX),
                "min": lambda: reduced(large.clone(), dist.ReduceOp.MIN),
                "small": lambda: reduced(small),
                "within": within,
                "broadcast": shared,
                "objects": gathered,
                "barrier": lambda: dist.barrier(group=g),
                "uneven": uneven,
            }.items():
                told[name] = flown(work)
        return told

    for told in ranks(2, run):
        row = {name: (value, *rows) for name, (value, rows) in told.items() if len(rows) == 1}
        assert row["integers"] == (1, ("all_reduce", "exact", "int64"))
        assert row["max"] == (1.0, ("all_reduce", "exact", "MAX"))
        assert row["min"] == (0.0, ("all_reduce", "exact", "MIN"))
        assert row["small"] == (1.0, ("all_reduce", "exact", "less than 65,536 bytes"))
        assert row["within"] == (
            float(torch.tensor(0.1) + torch.tensor(1.1)),
            ("all_reduce", "exact", "within exact()"),
        )
        assert row["broadcast"] == (1.0, ("broadcast", "exact", "not in the policy"))
        assert row["barrier"] == (None, ("barrier", "exact", "not in the policy"))
        assert row["uneven"] == (None, ("all_gather", "exact", "unequal sizes"))
        assert told["objects"][0] == [{"rank": 0}, {"rank": 1}]


def test_messages_and_unequal_splits():
    def run():
        rank, size = dist.get_rank(), dist.get_world_size()
        with group(bk.backend.Policy(least=0)) as g:
            x = torch.full((3,), float(rank))
            got = torch.zeros(3)
            sending = dist.isend(x, group=g, group_dst=(rank + 1) % size)
            with pytest.raises(RuntimeError, match="not implemented"):  # a message has no future, as over gloo
                sending.get_future()
            dist.recv(got, group=g, group_src=(rank - 1) % size)
            sending.wait()
            assert got.tolist() == [(rank - 1) % size] * 3
            # To rank r go 100 · r rows: none to rank 0.
            here, there = [100 * r for r in range(size)], [100 * rank] * size
            rows = torch.full((sum(here), 2), float(rank))
            out = torch.empty(sum(there), 2)
            _, flew = flown(lambda: dist.all_to_all_single(out, rows, there, here, group=g))
            assert torch.equal(out, torch.arange(size * 1.0).repeat_interleave(100 * rank)[:, None].expand(-1, 2))
            assert sum(flew.values()) == 1

    ranks(3, run)


def test_work_is_asynchronous_and_in_order():
    def run():
        with group(bk.backend.Policy(least=0)) as g:
            xs = [torch.full((1 << 12,), float(i)) for i in range(4)]
            works = [dist.all_reduce(x, group=g, async_op=True) for x in xs]
            futures = [work.get_future() for work in works]
            for i in reversed(range(4)):
                assert futures[i].wait()[0] is xs[i] and torch.equal(xs[i], torch.full_like(xs[i], 2.0 * i))
                works[i].wait()
                assert works[i].is_completed()
            late = dist.all_reduce(torch.ones(3, dtype=torch.int64), group=g, async_op=True)
            assert late.get_future().wait()[0].tolist() == [2, 2, 2]
            assert late.wait(timedelta(seconds=5))

    ranks(2, run)


@pytest.mark.parametrize(
    "operation", ["all_reduce of 9 values of float32, SUM", "all_reduce, exact, of 9 values of int64, SUM"]
)
def test_a_wait_may_have_a_limit_of_its_own_and_the_work_goes_on(operation):
    """The other rank launches when it hears that the wait is over."""

    def run():
        store = dist.distributed_c10d._get_default_store()
        with group(bk.backend.Policy(least=0)) as g:
            if dist.get_rank() == 1:
                store.wait([operation])
            x = torch.ones(9, dtype=torch.int64 if "exact" in operation else torch.float32)
            work = dist.all_reduce(x, group=g, async_op=True)
            if dist.get_rank() == 0:
                with pytest.raises(RuntimeError, match=f"{operation} has not ended within the 0:00:00.1"):
                    work.wait(timedelta(seconds=0.1))
                store.set(operation, "")
            assert work.wait(timedelta(seconds=60)) and x.tolist() == [2] * 9

    ranks(2, run)


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ({"operations": ("broadcast",)}, ValueError, "operations"),
        ({"compressor": bk.compressors.TopK(0.1)}, TypeError, "keeps other places"),
        ({"compressor": "uint8"}, TypeError, "compressor"),
        ({"flows": 0}, ValueError, "flows"),
        ({"least": -1}, ValueError, "least"),
    ],
)
def test_a_policy_refuses(arguments, error, says):
    with pytest.raises(error, match=says):
        bk.backend.Policy(**arguments)


def test_policies_print_as_they_are_built():
    policy = bk.backend.Policy(bk.compressors.UInt4(), operations=("all_reduce",), flows=4)
    assert repr(policy) == "Policy(UInt4(), operations=('all_reduce',), flows=4)"
    assert bk.backend.Policy() == eval(repr(bk.backend.Policy()), vars(bk.backend) | vars(bk.compressors))
    with pytest.raises(TypeError, match="policy"):
        bk.backend.register("uint8")
