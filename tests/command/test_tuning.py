"""The subcommands for the ranks of torchrun: alone they say how to start it, and wrong models are one sentence."""

import argparse
import contextlib
import io
import os
import socket
import sys
import types

import pytest
import torch.distributed as dist
from pool import Pool

from baguakit.command import main, tuning
from baguakit.command.screen import Refusal
from baguakit.command.tuning import algorithms_of, model_of, nccl_sockets, numbers
from baguakit.tune import Line, Link, Network

MODELS = """
import torch

value = 3


def model():
    return torch.nn.Linear(300, 100)


def number():
    return 3


def broken():
    return undefined
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """The folder of a module of models, from which the command is started."""
    (tmp_path / "models_of_a_user.py").write_text(MODELS)
    (tmp_path / "module_that_fails.py").write_text("import module_that_is_not_there")
    (tmp_path / "module_that_raises.py").write_text("raise RuntimeError('no data')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("models_of_a_user", "module_that_fails", "module_that_raises"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("words", [["plan", "train:net"], ["probe"]])
def test_without_torchrun_they_say_how_to_start_it(words, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert main(words) == 2
    said, errors = capsys.readouterr()
    assert said == "" and f"torchrun --standalone --nproc_per_node=4 -m baguakit {words[0]}" in errors
    assert "--node_rank=0" in errors and "--master_addr=HOST" in errors and max(map(len, errors.splitlines())) <= 80


@pytest.mark.parametrize(
    "place, sentence",
    [
        ("models", "the model is given as module:name, such as train:make_model, not 'models'"),
        ("nowhere_to_be_found:net", "cannot import nowhere_to_be_found:net .*: No module named 'nowhere_to_be_found'"),
        ("module_that_fails:net", "cannot import module_that_fails:net .*: No module named 'module_that_is_not_there'"),
        ("module_that_raises:net", "cannot import module_that_raises:net in this folder: RuntimeError: no data"),
        ("models_of_a_user:net", "cannot import models_of_a_user:net .* 'models_of_a_user' has no attribute 'net'"),
        ("models_of_a_user:value", "models_of_a_user:value is a function that returns the model, not int"),
        ("models_of_a_user:number", r"models_of_a_user:number\(\) returns the model, a torch.nn.Module, not int"),
        ("models_of_a_user:broken", r"models_of_a_user:broken\(\) raises NameError: name 'undefined' is not defined"),
    ],
)
def test_wrong_models_are_refused_in_one_sentence(models, place, sentence):
    with pytest.raises(Refusal, match=sentence):
        model_of(place)


def test_wrong_names_and_numbers_are_refused_in_one_sentence(capsys):
    with pytest.raises(Refusal, match="--algorithms: nonsense is no algorithm: name 'nonsense' is not defined"):
        algorithms_of("bytegrad,nonsense")
    with pytest.raises(Refusal, match=r"--algorithms: push_sum\(\) raises TypeError: "):
        algorithms_of("push_sum")
    assert numbers("1,4") == (1, 4)
    with pytest.raises(SystemExit, match="2"):
        main(["probe", "--flows=many"])
    assert "argument --flows: invalid numbers value: 'many'" in capsys.readouterr().err


def on_links(rates, per_node=1, **parts):
    """A network whose links between nodes, or all of whose links, have these rates by their number of flows."""
    lines = {flows: Line(0.0, 1 / rate) for flows, rate in rates.items()}
    links = [Link("inter" if per_node > 1 else "flat", flows, 2, line, line) for flows, line in lines.items()]
    links += [Link(part, 1, 2, Line(0.0, 1 / rate), Line(0.0, 1 / rate)) for part, rate in parts.items()]
    return Network(2 * per_node, per_node, "cpu", 1, tuple(links))


@pytest.mark.parametrize(
    "network, threads, sockets",
    [
        (Network(1, 1, "cpu", 1, ()), 1, 1),
        (on_links({1: 1e9, 2: 1e9, 8: 1e9}), 1, 1),
        (on_links({1: 1e9, 2: 2e9, 4: 4e9, 8: 4.1e9}), 4, 1),
        (on_links({1: 95.0, 4: 100.0}), 1, 1),  # 95 % is enough
        (on_links({1: 94.9, 4: 100.0}), 4, 1),
        (on_links({1: 1e9, 16: 16e9}), 16, 1),
        (on_links({1: 1e9, 64: 64e9}), 16, 4),
        (on_links({1: 1e9, 20: 20e9}), 10, 2),
        (on_links({1: 1e9, 17: 17e9}), 1, 17),
        (on_links({1: 1e9, 2: 2e9}, per_node=4, flat=9e9, intra=9e9), 2, 1),  # NCCL uses sockets between nodes only
    ],
)
def test_nccl_gets_the_fewest_sockets_that_carry_enough(network, threads, sockets):
    assert nccl_sockets(network) == (threads, sockets)
    assert threads <= 16 and threads * sockets <= 64


@pytest.mark.parametrize("here, flows, printed", [("1", 4, True), ("2", 4, False), ("1", 1, False)])
def test_a_probe_prints_settings_of_sockets_where_ranks_are_on_several_machines(
    here, flows, printed, monkeypatch, capsys
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    monkeypatch.setattr(tuning, "probe", lambda *_, **__: on_links({1: 1e9, flows: flows * 1e9}))
    tuning.run_probe(argparse.Namespace(flows=None, seconds=1.0, json=None), types.SimpleNamespace(size=2))
    line = "\n    export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=1\n"
    assert capsys.readouterr().out.endswith(line) == printed


def free_ports(count):
    """Ports of this host that nobody listens on, all different."""
    with contextlib.ExitStack() as open_until_all_are_known:
        sockets = [open_until_all_are_known.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@pytest.mark.slow  # torchrun, and two ranks that import torch
def test_they_run_on_the_ranks_of_torchrun(models):
    """In one group after another, as torchrun starts them; rank 0 alone speaks."""

    def run(ports, *lines):
        dist.destroy_process_group()
        told = []
        for port, words in zip(ports, lines, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = main(words.split())
            told.append((status, out.getvalue(), err.getvalue()))
        return told

    ports = free_ports(4)  # one for each: rank 1 may begin the next while rank 0 still ends the store of the last
    plan = "plan models_of_a_user:model --flows 1 --seconds 0.05 --algorithms gradient_allreduce,bytegrad --step-ms 5"
    with Pool(2) as pool:
        first, second = pool.run(
            run,
            ports,
            plan,
            "probe --flows 1 --seconds 0.05 --json measured.json",
            "plan models_of_a_user:number",
            "demo --steps 2 --algorithm bytegrad",
        )
    assert [status for status, _, _ in first] == [0, 0, 1, 0]
    assert second == [(0, "", "")] * 4
    planned, probed, refused, trained = (out + err for _, out, err in first)
    assert "Measuring the network between 2 ranks" in planned and "Predicted by a model" in planned
    assert "bk.attach(model, optimizer, bk.algorithms." in planned
    assert "\n2 ranks, cpu, 1 threads\n" in probed
    assert Network.from_json((models / "measured.json").read_text()).ranks == 2
    assert refused == "baguakit: models_of_a_user:number() returns the model, a torch.nn.Module, not int\n"
    assert "2 ranks over gloo; 2 steps" in trained and "Over loopback bytes cost next to" in trained
    assert [line for text in (planned, probed, trained) for line in text.splitlines() if len(line) > 80] == []
