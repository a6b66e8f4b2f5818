"""The door to torch.distributed: groups, time, counts."""

import pytest
import torch
from pool import ranks


def test_time_has_two_hands():
    def run():
        import baguakit as bk

        comm = bk.Comm()
        with pytest.raises(ValueError, match="stands at no round"):
            comm.round  # noqa: B018
        with pytest.raises(ValueError, match="stands at no step"):
            comm.at(3).step  # noqa: B018
        there = comm.at(3, step=7)
        return there.round, there.step, there.size

    assert ranks(2, run) == [(3, 7, 2)] * 2


def test_keys_differ_by_rank_round_and_bucket_and_are_shared_where_asked():
    def run():
        import baguakit as bk

        comms = [bk.Comm().stand(r, None, b, {}) for r in range(3) for b in range(3)]
        return [c.key() for c in comms], [c.key(shared=True) for c in comms]

    results = ranks(3, run)
    own = [key for keys, _ in results for key in keys]
    assert len(set(own)) == 27 and all(0 <= key < 2**31 for key in own)
    assert results[0][1] == results[1][1] == results[2][1] and len(set(results[0][1])) == 9


@pytest.mark.parametrize("n", [1, 2, 4])
def test_collectives(n):
    def run():
        import torch.distributed as dist

        import baguakit as bk

        r, sent = dist.get_rank(), {}
        comm = bk.Comm().stand(0, 0, 0, sent)
        x = torch.arange(4.0 * n) + r
        out = {
            "sum": comm.all_reduce(x.clone()),
            "shard": comm.reduce_scatter(x.clone()),
            "all": comm.all_gather(torch.full((2,), float(r))),
            "first": comm.broadcast(torch.full((2,), float(r))),
            "objects": comm.gather_objects({"rank": r}),
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
        assert out["objects"] == [{"rank": p} for p in range(n)]
        assert out["ring"] == {p: float(p) for p in {(r - 1) % n, (r + 1) % n} - {r}}
        peers = len({(r - 1) % n, (r + 1) % n} - {r})
        wire = 2 * (n - 1) / n * 16 * n + (n - 1) * 16 + (n - 1) * 8 + peers * 12
        assert sent == ({"flat": wire} if n > 1 else {})


def test_nodes():
    def run():
        from torch.distributed.device_mesh import init_device_mesh

        import baguakit as bk

        with pytest.raises(ValueError, match='"inter", "intra"'):
            bk.Comm(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
        with pytest.raises(ValueError, match="knows no nodes"):
            bk.Comm().intra  # noqa: B018
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
        comm = bk.Comm(mesh=mesh).at(5)
        assert comm.intra.round == comm.inter.round == 5
        return comm.size, (comm.inter.rank, comm.intra.rank), comm.intra.size, comm.inter.size

    assert [each[1] for each in ranks(4, run)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(each[0] == 4 and each[2:] == (2, 2) for each in ranks(4, run))


def test_a_group_of_some_ranks():
    def run():
        import torch.distributed as dist

        import baguakit as bk

        group = dist.new_group([2, 0])
        x = torch.full((3,), float(dist.get_rank()))
        if dist.get_rank() != 1:
            bk.primitives.mean_(x, bk.Comm(group))
        dist.destroy_process_group(group)
        return x[0].item()

    assert ranks(3, run) == [1.0, 1.0, 1.0]
