"""TORCH_DISTRIBUTED_DEBUG=DETAIL: torch wraps its groups, checks their messages, and looks up what it logs."""

import contextlib
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from training import train

import baguakit as bk


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
