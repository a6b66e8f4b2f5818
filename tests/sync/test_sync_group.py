"""Publisher and subscribers in one group: what comes along the chain of ranks is the published version."""

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from pool import ranks

import baguakit as bk


def tensors(rank):
    return {"w": torch.full((5000, 70), 1.0 + rank, dtype=torch.bfloat16), "b": torch.zeros(3)}


def step(w, seed):
    source = torch.Generator().manual_seed(seed)
    w["w"] += torch.where(torch.rand(w["w"].shape, generator=source) < 0.02, 0.01, 0.0).bfloat16()
    w["b"] += 1


def test_all_ranks_follow_rank_0():
    def run():
        comm = bk.Comm()
        mine = tensors(comm.rank)
        there = tensors(0)
        early = comm.rank == 2
        one = bk.sync.Publisher(mine, comm) if comm.rank == 0 else bk.sync.Subscriber(mine, comm, early=early)
        versions = []
        for i in range(4):
            step(there, i)
            if comm.rank == 0:
                step(mine, i)
            versions.append(one.publish() if comm.rank == 0 else one.update())
            assert all(torch.equal(mine[name], there[name]) for name in mine)
        return versions

    assert ranks(3, run) == [[0, 1, 2, 3]] * 3


def test_who_missed_versions_gets_their_changes_or_a_whole_copy():
    def run():
        comm = bk.Comm()
        mine, there = tensors(comm.rank), tensors(0)
        publisher = bk.sync.Publisher(mine, comm, keep=0.2) if comm.rank == 0 else None
        follower = None if comm.rank == 0 else bk.sync.Subscriber(mine, comm)
        for i in range(3):
            step(there, i)
            if publisher:
                step(mine, i)
            publisher.publish() if publisher else follower.update()
        if comm.rank == 2:  # as one that has come back with the values of version 0
            old = tensors(0)
            step(old, 0)
            for name, x in mine.items():
                x.copy_(old[name])
            follower.version, follower._written = 0, None
        step(there, 3)
        if publisher:
            step(mine, 3)
        publisher.publish() if publisher else follower.update()
        assert all(torch.equal(mine[name], there[name]) for name in mine)
        if comm.rank == 1:
            follower.version, follower._written = -1, None
            mine["w"].zero_()
        step(there, 4)
        if publisher:
            step(mine, 4)
        publisher.publish() if publisher else follower.update()
        return all(torch.equal(mine[name], there[name]) for name in mine)

    assert ranks(3, run) == [True] * 3


def test_rank_0_publishes():
    def run():
        comm = bk.Comm()
        with pytest.raises(ValueError, match="to is a Comm on its rank 0, source a Comm on its other ranks"):
            (bk.sync.Publisher if comm.rank else bk.sync.Subscriber)({"a": torch.zeros(1)}, comm)

    ranks(2, run)


def test_the_version_of_another_publisher_is_none():
    def run():
        comm = bk.Comm()
        mine, there = tensors(comm.rank), tensors(0)
        one = bk.sync.Publisher(mine, comm) if comm.rank == 0 else bk.sync.Subscriber(mine, comm)
        for i in range(3):
            step(there, i)
            if comm.rank == 0:
                step(mine, i)
            if comm.rank == 1 and i == 2:  # as one that has followed another publisher to version 1
                one.run, one._written = "0" * 12, None
                mine["w"].fill_(7)
            one.publish() if comm.rank == 0 else one.update()
        return all(torch.equal(mine[name], there[name]) for name in mine)

    assert ranks(2, run) == [True] * 2


def test_tensors_of_many_parts_and_streams_of_many_messages():
    """Parts, messages, and messages on their way are so small here that all of them are many."""

    def run():
        small = pytest.MonkeyPatch()
        small.setattr("baguakit.sync.versions.RANGE", 1 << 15)
        small.setattr("baguakit.sync.groups.PIECE", 1000)
        small.setattr("baguakit.sync.groups.MOST", 3)
        comm = bk.Comm()
        mine = {"w": torch.zeros(90_000), "z": torch.zeros(70, 300, dtype=torch.complex128).t(), "e": torch.zeros(0, 3)}
        early, zstd = comm.rank == 2, 1 if find_spec("zstandard") else 0
        one = (
            bk.sync.Publisher(mine, comm, keep=9, zstd=zstd)
            if comm.rank == 0
            else bk.sync.Subscriber(mine, comm, early=early)
        )
        for i in range(3):
            there = torch.arange(90_000.0) % (7 + i)
            if comm.rank == 0:
                mine["w"].copy_(there)
                mine["z"].fill_(1j + i)
            one.publish() if comm.rank == 0 else one.update()
            assert torch.equal(mine["w"], there)
            assert bool((mine["z"] == 1j + i).all())
        small.undo()
        return one.version

    assert ranks(3, run) == [2, 2, 2]


def test_who_cannot_take_a_packet_passes_it_on_and_takes_the_next():
    def run():
        comm = bk.Comm()
        mine = {"w": torch.zeros(900_000)}
        if comm.rank == 1:
            mine["more"] = torch.zeros(1)
        one = bk.sync.Publisher(mine, comm) if comm.rank == 0 else bk.sync.Subscriber(mine, comm)
        for i in range(2):
            if comm.rank == 0:
                mine["w"] += torch.arange(900_000) % 3
            if comm.rank == 1 and i == 0:
                with pytest.raises(ValueError, match="from rank 0: 'more' is not published"):
                    one.update()
                assert not mine["w"].any()
                del mine["more"]
            else:
                one.publish() if comm.rank == 0 else one.update()
        return torch.equal(mine["w"], 2.0 * (torch.arange(900_000) % 3))

    assert ranks(3, run) == [True] * 3


def test_the_mean_of_the_ranks_weights_is_published_for_evaluation_elsewhere(tmp_path):
    def run():
        torch.manual_seed(0)
        model = torch.nn.Linear(30, 20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank = bk.Comm().rank
        publisher = bk.sync.Publisher(model, tmp_path) if rank == 0 else None
        served = torch.nn.Linear(30, 20)
        with bk.attach(model, optimizer, bk.algorithms.local_sgd(every=100)) as att:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(4, 30, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
                optimizer.step()
            apart = att.consensus_distance()
            att.merge()
            if publisher:
                publisher.publish()
            dist.barrier()
            bk.sync.Subscriber(served, tmp_path).update()
            return apart > 0 and all(map(torch.equal, served.parameters(), model.parameters()))

    assert ranks(2, run) == [True] * 2
