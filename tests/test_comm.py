"""The door to torch.distributed: groups, time, counts, and torch's debugging."""

import contextlib
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training import train

import baguakit as bk
from baguakit.comm.sending import Rider


def test_time_has_two_hands():
    def run():
        comm = bk.Comm()
        with pytest.raises(ValueError, match="has no round"):
            comm.round  # noqa: B018
        with pytest.raises(ValueError, match="has no step"):
            comm.at(3).step  # noqa: B018
        there = comm.at(3, step=7)
        return there.round, there.step, there.size

    assert ranks(2, run) == [(3, 7, 2)] * 2


def test_keys_differ_by_rank_round_and_bucket_and_are_shared_where_asked():
    def run():
        comms = [bk.Comm().for_flight(r, None, b, {}) for r in range(3) for b in range(3)]
        return [c.key() for c in comms], [c.key(shared=True) for c in comms]

    results = ranks(3, run)
    own = [key for keys, _ in results for key in keys]
    assert len(set(own)) == 27 and all(0 <= key < 2**31 for key in own)
    assert results[0][1] == results[1][1] == results[2][1] and len(set(results[0][1])) == 9


@pytest.mark.parametrize("n", [1, 2, 4])
def test_collectives(n):
    def run():
        r, sent = dist.get_rank(), {}
        comm = bk.Comm().for_flight(0, 0, 0, sent)
        x = torch.arange(4.0 * n) + r
        out = {
            "sum": comm.all_reduce(x.clone()),
            "shard": comm.reduce_scatter(x.clone()),
            "all": comm.all_gather(torch.full((2,), float(r))),
            "first": comm.broadcast(torch.full((2,), float(r))),
            "objects": comm.gather_objects({"rank": r}),
            "one object": [comm.broadcast_object({"rank": r} if r == source else None, source) for source in range(n)],
        }
        ring = {(r - 1) % n, (r + 1) % n} - {r}
        out["ring"] = {p: float(t[0]) for p, t in comm.exchange(torch.full((3,), float(r)), sorted(ring), ring).items()}
        return out, sent

    base, total = torch.arange(4.0 * n), sum(range(n))
    for r, (out, sent) in enumerate(ranks(n, run)):
        assert torch.equal(out["sum"], n * base + total)
        assert torch.equal(out["shard"], (n * base + total)[4 * r : 4 * r + 4])
        assert torch.equal(out["all"], torch.arange(float(n)).repeat_interleave(2))
        assert torch.equal(out["first"], torch.zeros(2))
        assert out["objects"] == out["one object"] == [{"rank": p} for p in range(n)]
        assert out["ring"] == {p: float(p) for p in {(r - 1) % n, (r + 1) % n} - {r}}
        peers = len({(r - 1) % n, (r + 1) % n} - {r})
        wire = 2 * (n - 1) / n * 16 * n + (n - 1) * 16 + (n - 1) * 8 + (n - 1) / n * 8 + peers * 12
        assert sent == ({"flat": wire} if n > 1 else {})


@pytest.mark.parametrize("flows", [1, 2])
def test_tensors_of_any_strides(flows):
    """Torch's own all-reduce over gloo adds the wrong values of a tensor with gaps, without an error."""

    def run():
        comm, there = bk.Comm(flows=flows), 1 - dist.get_rank()

        def of(rank, dtype=torch.float32):  # (2, 6), with gaps
            return (torch.arange(24.0) * (rank + 1)).to(dtype).view(6, 4).t()[::2]

        mine, added = of(comm.rank), of(2)
        assert comm.all_reduce(x := mine.clone(memory_format=torch.preserve_format)) is x and torch.equal(x, added)
        comm.all_reduce(x := of(comm.rank))
        comm.all_reduce_later(later := of(comm.rank)).wait()
        assert torch.equal(x, added) and torch.equal(later, added)
        assert torch.equal(comm.all_gather(mine), torch.cat([of(0), of(1)]))
        comm.all_gather_later(out := torch.zeros(8, 6)[::2], mine).wait()
        assert torch.equal(out, torch.cat([of(0), of(1)]))
        comm.all_to_all_later(out := torch.zeros(6, 4).t()[::2], mine).wait()
        assert torch.equal(out, torch.stack([of(rank)[comm.rank] for rank in range(2)]))
        assert torch.equal(comm.exchange(mine, [there], [there])[there], of(there))
        assert torch.equal(comm.reduce_scatter(of(comm.rank)[0]), of(2)[0, 3 * comm.rank :][:3])
        for dtype in (torch.float32, torch.int16, torch.complex64):
            assert torch.equal(comm.broadcast(of(comm.rank, dtype), 1), of(1, dtype))
            assert torch.equal(comm.exchange(of(comm.rank, dtype), [there], [there])[there], of(there, dtype))
        turned = torch.full((3,), comm.rank + 1j).conj()
        assert comm.all_gather(turned).tolist() == [-1j] * 3 + [1 - 1j] * 3
        assert comm.all_reduce(turned) is turned and turned.tolist() == [1 - 2j] * 3
        with pytest.raises(ValueError, match="values of 'x' share memory"):
            comm.all_reduce(torch.ones(1).expand(4))
        assert comm.all_gather(torch.ones(1).expand(4)).tolist() == [1.0] * 8
        assert comm.all_gather(torch.ones(2, requires_grad=True)).tolist() == [1.0] * 4
        return True

    assert ranks(2, run) == [True] * 2


def test_collectives_refuse_what_gloo_would_end_the_process_for():
    def run():
        comm, x = bk.Comm(), torch.ones(3)
        for call, said in (
            (lambda: comm.reduce_scatter(x), "x is flat, of a length that 2 ranks divide, not a tensor"),
            (lambda: comm.reduce_scatter(torch.tensor(1.0)), "x is flat"),
            (lambda: comm.all_gather(torch.tensor(1.0)), "x is of one dimension or more"),
        ):
            with pytest.raises(ValueError, match=said):
                call()
        for call, said in (
            (lambda: comm.all_reduce(x, "sum"), "op is a reduction such as torch.distributed.ReduceOp.SUM, not 'sum'"),
            (lambda: comm.all_reduce_later(x, None), "op is a reduction"),
            (lambda: comm.all_reduce(x.short()), "x is of a dtype that gloo and NCCL add, such as float32 or int32"),
            (lambda: comm.reduce_scatter(x.to(torch.float8_e4m3fn)), "x is of a dtype"),
            (lambda: bk.primitives.mean_(x.to(torch.float8_e4m3fn), comm), "x is float32, bfloat16"),
        ):
            with pytest.raises(TypeError, match=said):
                call()
        return comm.all_reduce(x).tolist()

    assert ranks(2, run) == [[2.0] * 3] * 2


def test_an_object_that_cannot_be_sent_is_an_error_on_all_ranks():
    def run():
        comm, said = bk.Comm(), []
        for call in (comm.broadcast_object, comm.gather_objects):
            with pytest.raises(TypeError) as caught:
                call((lambda: 0) if comm.rank == 0 else 1)
            said.append(str(caught.value))
        with pytest.raises(TypeError, match="with plain=True"):
            comm.gather_objects(b"", plain=True)
        with pytest.raises(ValueError, match="the value of rank 0 cannot be read"):  # torch's pickles of float8
            comm.broadcast_object(torch.zeros(4).to(torch.float8_e4m3fn))
        assert comm.gather_objects(comm.rank) == [0, 1]
        return said

    first, second = ranks(2, run)
    assert all("value cannot be pickled (" in each for each in first)
    assert second == ["the value of rank 0 cannot be sent; that rank says why"] * 2


def test_dtypes_that_gloo_does_not_send_go_as_bytes():
    def run():
        comm, rank = bk.Comm(), dist.get_rank()
        for dtype in (torch.int16, torch.uint32, torch.float8_e4m3fn):
            x = torch.full((6,), float(rank)).to(dtype)[::6]  # a single value, with a stride of 6
            assert comm.all_gather(x).tolist() == [0, 1]
            assert comm.broadcast(x, 1).tolist() == [1]
        return True

    assert ranks(2, run) == [True] * 2


def test_nodes():
    def run():
        with pytest.raises(ValueError, match='"inter", "intra"'):
            bk.Comm(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
        with pytest.raises(ValueError, match="has no mesh"):
            bk.Comm().intra  # noqa: B018
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
        comm = bk.Comm(mesh=mesh).at(5)
        assert comm.intra.round == comm.inter.round == 5
        return comm.size, (comm.inter.rank, comm.intra.rank), comm.intra.size, comm.inter.size

    assert [each[1] for each in ranks(4, run)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(each[0] == 4 and each[2:] == (2, 2) for each in ranks(4, run))


def test_a_group_of_some_ranks():
    def run():
        group = dist.new_group([2, 0])
        x = torch.full((3,), float(dist.get_rank()))
        if dist.get_rank() != 1:
            bk.primitives.mean_(x, bk.Comm(group))
        dist.destroy_process_group(group)
        return x[0].item()

    assert ranks(3, run) == [1.0, 1.0, 1.0]


def test_the_group_of_a_mesh_of_some_ranks_waits_for_no_other_rank():
    """With a device of its own, torch would split the communicator of all ranks, which all of them must call."""

    def run():
        rank, asked = dist.get_rank(), torch.device("cuda", 0)
        mesh = DeviceMesh("cpu", [[2], [0]], mesh_dim_names=("inter", "intra"))
        dist.group.WORLD.bound_device_id = asked
        try:
            comm = bk.Comm(mesh=mesh) if rank != 1 else None
            assert dist.group.WORLD.bound_device_id == asked
        finally:
            dist.group.WORLD.bound_device_id = None
        return bk.primitives.mean_(torch.full((1,), float(rank)), comm).item() if comm else None

    assert ranks(3, run) == [1.0, None, 1.0]


def test_a_cold_group_meets_before_a_rank_without_peers_goes_on():
    """NCCL makes a communicator in the first call, and waits there for all ranks: they send one byte, once."""

    def run():
        from types import SimpleNamespace

        from torch._subclasses import FakeTensorMode

        class Recording(dist.ProcessGroup):
            def __init__(self, rank, size):
                super().__init__(rank, size)
                self.calls = []

            def _get_backend(self, device):
                return SimpleNamespace(name=lambda: "nccl")

            def send(self, tensors, peer, tag):
                self.calls.append(f"send {peer}")

            def recv(self, tensors, peer, tag):
                self.calls.append(f"receive {peer}")

            def _start_coalescing(self, device):
                self.calls.append("start")

            def _end_coalescing(self, device):
                self.calls.append("end")
                return self

            def wait(self):
                return True

        def all_reduce(x, group):
            group.calls.append(f"all-reduce {x.nbytes} B on {x.device}")

        found = []
        for rank in range(3):  # ranks 1 and 2 exchange; rank 0 has no peer
            comm = bk.Comm(Recording(rank, 3))
            peers = [3 - rank] if rank else []
            with FakeTensorMode(), patch.object(dist, "all_reduce", all_reduce):
                x = torch.empty(4, device="cuda:1")
                comm.exchange(x, peers, peers)
                comm.exchange_each(dict.fromkeys(peers, x), {}, x.device)
            found.append(comm.group.calls)
        return found

    first = "all-reduce 1 B on cuda:1"
    for alone, *others in ranks(1, run):
        assert alone == [first]
        for rank, calls in enumerate(others, 1):
            peer = 3 - rank
            assert calls == [first, "start", f"send {peer}", f"receive {peer}", "end", "start", f"send {peer}", "end"]


def test_flags_ride_with_the_first_gathers_that_reach_all_ranks():
    def run():
        comm = bk.Comm(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))).for_flight(0, 0, 0, {})
        mine = torch.tensor([comm.rank, 3 - comm.rank], dtype=torch.uint8)
        x = torch.full((3,), comm.rank, dtype=torch.bfloat16)
        flat, nodes, within, none = (Rider(mine, 4) for _ in range(4))
        gathered = [flat.aboard(comm).all_gather(x) for _ in range(2)]  # the second without it
        between = nodes.aboard(comm).inter
        gathered.append(between.all_gather(between.all_gather(x)))
        gathered.append(nodes.aboard(comm).intra.all_gather(x))
        gathered.append(within.aboard(comm).intra.all_gather(x))
        for rider in (flat, nodes, within, none):
            rider.arrive(comm)
        shapes = [tuple(rider.rows.shape) for rider in (flat, nodes, within, none)]
        return [rider.rows.amax(0).tolist() for rider in (flat, nodes, within, none)], shapes, gathered

    for r, (rows, shapes, (first, second, twice, last, only)) in enumerate(ranks(4, run)):
        assert rows == [[3, 3]] * 4 and shapes == [(4, 2), (4, 2), (2, 2), (1, 2)]
        assert first.tolist() == second.tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3 + [3.0] * 3
        assert twice.tolist() == ([r % 2] * 3 + [r % 2 + 2] * 3) * 2
        assert last.tolist() == only.tolist() == [r // 2 * 2] * 3 + [r // 2 * 2 + 1] * 3


def test_flags_of_many_ranks_do_not_ride():
    rider = Rider(torch.zeros(1 << 10, dtype=torch.uint8), 256)
    assert rider.boards("flat", 256) is None and rider.boards("inter", 32) is not None


@contextlib.contextmanager
def detail():
    """A group made under DETAIL, on a torch that says it has NCCL, of which it then logs more."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group()
    try:
        with patch("torch.distributed.distributed_c10d.is_nccl_available", lambda: True):
            yield group
    finally:
        dist.destroy_process_group(group)
        dist.set_debug_level(before)


def everything(comm):
    """Return the results of every method of a Comm of two ranks."""
    r, other = comm.rank, 1 - comm.rank
    x, sums, rows, landed = torch.arange(4.0) + r, torch.arange(4.0) - r, torch.empty(2, 4), torch.empty(8)
    comm.all_reduce_later(sums).wait()
    comm.all_gather_later(landed, x).wait()
    comm.all_to_all_later(rows, torch.stack([x, -x])).wait()
    received = torch.empty(4)
    works = [comm.receive_later(received, other, 7), comm.send_later(x, other, 7)]
    for work in works:
        work.wait()
    return [
        sums,
        landed,
        rows,
        received,
        comm.all_reduce(x.clone()),
        comm.reduce_scatter(x.clone()),
        comm.all_gather(x),
        comm.broadcast(x.clone(), 1),
        comm.exchange(x, [other], [other])[other],
        comm.exchange_each({other: x}, {other: torch.empty(4)})[other],
        *comm.gather_objects({"rank": torch.full((r + 1,), r)})[other].values(),
    ]


def test_every_message_arrives_as_without():
    def run():
        plain = everything(bk.Comm())
        with detail() as group:
            comm = bk.Comm(group)
            assert "Wrapper" in type(group._get_backend(torch.device("cpu"))).__name__
            own = comm.own("detail", timedelta(seconds=30), torch.device("cpu"))
            checked = [everything(each) for each in (comm, own)]
            own.close()
        return [[torch.equal(a, b) for a, b in zip(plain, each, strict=True)] for each in checked]

    assert ranks(2, run) == [[[True] * 11] * 2] * 2


@pytest.mark.parametrize("name", ["bytegrad()", "decentralized()", "async_model_average()"])
def test_an_attachment_lives(name):
    def run():
        with detail() as group:
            return train(lambda bk: [eval(f"bk.algorithms.{name}", {"bk": bk})], steps=3, comm=bk.Comm(group))

    assert all(map(torch.isfinite, torch.cat([each.view(-1) for each in ranks(2, run)])))
