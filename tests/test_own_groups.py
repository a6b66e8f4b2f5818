"""Groups of one's own: which are made, how NCCL's are set up, and how all are given up."""

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from torch.distributed.device_mesh import init_device_mesh
from training import train

import baguakit as bk
from baguakit.comm import abort_all
from baguakit.comm.groups import SETTINGS, error_in, nccl_backend
from baguakit.comm.own import shut_all


def test_an_nccl_group_is_made_under_settings_that_are_put_back(monkeypatch):
    found = []

    class Options:
        pass

    def constructor(store, rank, size, options):
        settings = {name: os.environ.get(name) for name in SETTINGS}
        found.append((settings, dist.get_debug_level(), store, rank, size, vars(options)))
        raise RuntimeError("no GPU")

    constructor.Options = Options
    monkeypatch.setattr(dist, "ProcessGroupNCCL", constructor, raising=False)
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with pytest.raises(RuntimeError, match="no GPU"):
            nccl_backend("a store", 1, [4, 6, 8], "mine", timedelta(seconds=3))
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    finally:
        dist.set_debug_level(before)
    options = {"_timeout": timedelta(seconds=3), "group_name": "mine", "global_ranks_in_group": [4, 6, 8]}
    assert found == [(SETTINGS, dist.DebugLevel.INFO, "a store", 1, 3, options)]
    assert SETTINGS["TORCH_NCCL_NAN_CHECK"] == "0"  # an overflow is sent, and all ranks skip the step
    assert SETTINGS["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == SETTINGS["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"
    assert {name: os.environ[name] for name in SETTINGS if name in os.environ} == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"
    }


def test_torch_knows_the_settings():
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    if not header.exists():
        pytest.skip("this torch comes without its headers")
    text = header.read_text()
    assert [name for name in SETTINGS if f'"{name}"' not in text] == []
    assert "NoHandling = 0," in text and "#define SHOULD_TEAR_DOWN(a) (a != NoHandling && " in text
    assert not dist.is_nccl_available() or hasattr(dist.ProcessGroupNCCL, "get_error")


class FakeGroup:
    """A group of the device `kind`, which counts its ends; `met`: a barrier in `abort`, to which several must come."""

    def __init__(self, kind="cuda", error="SUCCESS", met=None):
        self._device_types, self.error, self.met = [torch.device(kind)], error, met
        self.ends = []

    def _get_backend(self, device):
        assert device.type == "cuda", "gloo has no get_error"
        return SimpleNamespace(get_error=lambda: SimpleNamespace(name=self.error))

    def abort(self):
        if self.met is not None:
            self.met.wait(30)
        self.ends.append("abort")

    def shutdown(self):
        self.ends.append("shutdown")


def test_the_first_error_of_any_group_is_found():
    assert error_in([]) == error_in([FakeGroup("cpu"), FakeGroup()]) == ""
    assert error_in([FakeGroup("cpu"), FakeGroup(), FakeGroup(error="COMM_ERROR"), FakeGroup(error="TIMEOUT")]) == (
        "COMM_ERROR"
    )


def test_groups_are_given_up_all_at_once_and_each_only_once():
    """NCCL can end one communicator only when another one has given up: here each waits for the other two."""
    met = threading.Barrier(3)
    groups, alive = [FakeGroup(met=met) for _ in range(3)], FakeGroup()
    abort_all(groups)
    abort_all(groups)
    shut_all([*groups, alive])
    assert [group.ends for group in groups] == [["abort"]] * 3 and alive.ends == ["shutdown"]


def test_a_group_that_cannot_be_given_up_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("baguakit.comm.own.ENDING", 0.01)
    met = threading.Barrier(2)
    stuck, other = FakeGroup(met=met), FakeGroup()
    abort_all([stuck, other])
    assert stuck.ends == [] and other.ends == ["abort"]
    met.wait(30)


def test_a_stage_of_ones_own_names_the_nodes_that_it_uses():
    def run():
        @dataclass(frozen=True)
        class WithinNodes(bk.stages.Stage):
            def __call__(self, x, state, comm):
                return bk.primitives.mean_(x, comm.intra)

        class Named(WithinNodes):
            needs_groups = ("intra",)

        comm = bk.Comm(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra")))
        said = []
        for stage in (WithinNodes(), Named()):
            try:
                train(lambda bk, s=stage: [bk.after_step(s)], steps=1, comm=comm)
            except Exception as error:
                said.append(str(error))
        return said

    for (sentence,) in ranks(4, run):
        assert "this Comm has no mesh" in sentence and "stages name both in `needs_groups`" in sentence


KILLED = """
import gc, os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
from baguakit.comm import abort_all
from baguakit.comm.groups import lazy_group

store, rank = dist.FileStore(sys.argv[1], 2), int(sys.argv[2])
groups = [lazy_group(dist.PrefixStore(str(i), store), rank, 2, timedelta(hours=1)) for i in range(8)]
if rank == 1:
    store.set("pid", str(os.getpid()))
    signal.pause()
os.kill(int(store.get("pid")), signal.SIGKILL)
x = torch.zeros(1)
works = [group.allgather([[x, x]], [x]) for group in groups]
abort_all(groups)
del groups, works
gc.collect()
"""


@pytest.mark.slow
def test_a_group_whose_peer_was_lost_before_its_first_message_stops_nobody_at_its_end(tmp_path):
    """gloo would wait in the end of the group, where of two ranks the other was to open the connection.

    Which of them does depends on their ports: of eight groups, that of one is the other's.
    """
    command = [sys.executable, "-c", KILLED, str(tmp_path / "store")]
    with subprocess.Popen([*command, "1"]) as lost:
        try:
            subprocess.run([*command, "0"], check=True, capture_output=True, timeout=100)
        finally:
            lost.kill()
