"""The store as a program."""

import re
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

import baguakit as bk

COMMAND = [sys.executable, "-m", "baguakit.store"]


def test_it_listens_on_one_address_until_it_is_interrupted():
    with subprocess.Popen([*COMMAND, "--bind", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True) as served:
        host, port = served.stdout.readline().split()[-1].rstrip(".").rsplit(":", 1)
        assert host == "127.0.0.1"
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        store.set("a", "b")
        assert store.get("a") == b"b"
        served.send_signal(signal.SIGINT)
        assert served.wait(30) == 0


@pytest.mark.parametrize(
    ("bind", "said"),
    [
        *((zero, "is every interface") for zero in ("0.0.0.0", "0", "0x0", "0.0", "00.0.0.0", "0:0", "[::0]:0")),
        ("::", "endpoint is"),
        ("[::]:1", "is every interface"),
        ("a:b", "endpoint is"),
        ("127.0.0.1:99999", "endpoint is"),
        ("http://127.0.0.1", "endpoint is"),
    ],
)
def test_it_refuses(bind, said, capsys):
    from baguakit.store.__main__ import main

    with pytest.raises(SystemExit):
        main(["--bind", bind])
    assert said in capsys.readouterr().err


def test_an_address_of_another_machine_is_refused(capsys):
    from baguakit.store.__main__ import main

    assert main(["--bind", "192.0.2.1:1"]) == 1
    assert "cannot listen on 192.0.2.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "endpoint", ["host:99999", "host:0", "http://host:1", "tcp://host", "host:1/", "::1:5", "a b:1", "user@host:1", ""]
)
def test_what_is_no_endpoint_is_refused_at_the_call(endpoint):
    with pytest.raises(ValueError, match=re.escape(f"with a port from 1 to 65535, not {endpoint!r}")):
        bk.elastic.join(endpoint)
