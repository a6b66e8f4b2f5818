"""Errors of a program in a group that it has joined."""

import signal

import pytest
import torch
import torch.distributed as dist

import baguakit as bk


@pytest.fixture
def joined():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = signal.getsignal(signal.SIGTERM)
    comm = bk.elastic.join(f"127.0.0.1:{store.port}", last_call=0.1)
    yield comm
    comm.membership.end_round(gone=True)
    signal.signal(signal.SIGTERM, before)


def test_an_attachment_to_no_group_says_what_to_pass(joined):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(RuntimeError, match=r"or pass comm=, which bk\.elastic\.join has"):
        bk.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), bk.algorithms.gradient_allreduce())


def test_a_group_that_was_left_with_the_last_attachment_is_joined_again(joined):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), comm=joined):
        pass
    with pytest.raises(RuntimeError, match=r"this rank has left the group .*; call bk\.elastic\.join again"):
        bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), comm=joined)


def test_an_error_of_the_program_that_speaks_of_gloo_is_raised(joined):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), comm=joined) as att:
        with pytest.raises(RuntimeError, match=r"cannot write gloo\.txt"), att.recoverable():
            raise RuntimeError("cannot write gloo.txt")
        assert att.step == 0
