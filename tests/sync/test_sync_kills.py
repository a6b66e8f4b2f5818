"""Publishers and subscribers are killed at drawn points: whoever is left has a published version, and then the newest.

The weights of a version are a function of its number.
"""

import contextlib
import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from forks import end, forked, kill

import baguakit as bk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LIMIT = timedelta(seconds=60)
SHAPES = {"a": (9000,), "b": (70, 60), "c": (3,)}


def weights(version: int) -> dict[str, torch.Tensor]:
    """The weights of a version, other ones for 4,850 versions; of −1 they are those that no one publishes."""
    made = {name: torch.full(shape, 2.0 if version >= 0 else 5.0).bfloat16() for name, shape in SHAPES.items()}
    for x in made.values():
        x.view(-1)[version % min(50, x.numel()) :: 50] += (1 + version % 97) / 64
    return made


def is_version(tensors: dict[str, torch.Tensor], version: int) -> bool:
    return all(torch.equal(x, weights(version)[name]) for name, x in tensors.items())


def publish_for_ever(folder):
    """Go on after the newest version, as a trainer does that loads its newest checkpoint."""
    tensors = weights(-1)
    publisher = bk.sync.Publisher(tensors, folder, keep=0.3)
    while True:
        for name, x in weights(publisher.version + 1).items():
            tensors[name].copy_(x)
        publisher.publish()


def follow(folder, reaches):
    """Follow until a version of at least `reaches`; every version that is seen must be one."""
    tensors = weights(-1)
    follower = bk.sync.Subscriber(tensors, folder)
    while (version := follower.update()) < reaches:
        if version >= 0 and not is_version(tensors, version):
            return False
    return is_version(tensors, version)


def newest(folder) -> int:
    return max((int(path.name.partition("-")[0]) for path in folder.glob("0*")), default=-1)


@pytest.fixture(autouse=True)
def alone():
    """A forked process has one thread, which must not wait for those of the parent."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(2))
def test_fifty_kills_beside_a_folder(seed, tmp_path):
    source = random.Random(seed)
    publisher, followers = forked(publish_for_ever, tmp_path), []
    for _ in range(25):
        followers = [forked(follow, tmp_path, 1 << 60) for _ in range(2)]
        had = newest(tmp_path)
        while newest(tmp_path) < had + source.randrange(1, 4):
            time.sleep(source.random() / 100)
        victim = source.choice(["publisher", "follower"])
        if victim == "publisher":
            kill(publisher)
            reached = newest(tmp_path)
            assert end(forked(follow, tmp_path, reached)) == 0
            publisher = forked(publish_for_ever, tmp_path)
            assert end(forked(follow, tmp_path, reached + 2)) == 0
        for each in followers:
            kill(each)
    kill(publisher)
    assert len(list(tmp_path.glob("unfinished-*"))) <= 1


def connect(store, rank, ranks):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=LIMIT)


def in_group(store, rank, ranks, rounds, last):
    """Publish or follow for so many rounds; when a peer is lost, the weights are those of a version."""
    connect(store, rank, ranks)
    tensors = weights(-1)
    comm = bk.Comm()
    early = rank == 1
    one = bk.sync.Publisher(tensors, comm) if rank == 0 else bk.sync.Subscriber(tensors, comm, early=early)
    dist.barrier()
    store.with_name(f"{store.name}-{rank}").touch()
    with contextlib.suppress(RuntimeError):  # gloo's, as a peer is gone
        for version in range(rounds):
            if rank == 0:
                for name, x in weights(version).items():
                    tensors[name].copy_(x)
            one.publish() if rank == 0 else one.update()
        return False  # nobody was lost
    del comm
    dist.destroy_process_group()  # nothing holds it, so connections close, and the others hear of it
    if not is_version(tensors, one.version) and one.version >= 0:
        return False
    with pytest.raises(RuntimeError, match="an exchange has failed here"):
        one.publish() if rank == 0 else one.update()
    return last is None or goes_on(one, tensors, rank, ranks, last)


def goes_on(one, tensors, rank, ranks, store):
    """Form a group of those who are left, without the last rank; the second publication brings all to the newest."""
    connect(store, rank, ranks - 1)
    one.regroup(bk.Comm())
    for _ in range(2):
        if rank == 0:
            for name, x in weights(one.version + 1).items():
                tensors[name].copy_(x)
        one.publish() if rank == 0 else one.update()
    dist.barrier()
    dist.destroy_process_group()
    return is_version(tensors, one.version)


@pytest.mark.parametrize("seed", range(2))
def test_twenty_five_kills_in_groups(seed, tmp_path):
    source = random.Random(seed)
    for trial in range(25):
        victim, store, later = source.choice([0, 2]), tmp_path / f"{trial}", tmp_path / f"{trial}-later"
        last = later if victim == 2 else None
        ranks = [forked(in_group, store, rank, 3, 1 << 60, last) for rank in range(3)]
        while len(list(tmp_path.glob(f"{trial}-?"))) < 3:
            time.sleep(0.01)
        time.sleep(0.3 * source.random())
        kill(ranks[victim])
        assert [end(child) for rank, child in enumerate(ranks) if rank != victim] == [0, 0], (trial, victim)
