"""The documented lines for two machines work on two hosts of the network laboratory.

Hosts have names here, as machines do: `first` and `second`, which resolve by /etc/hosts. On some machines the name
resolves to the address of the network card (as with DNS in a cloud); on others, such as Debian's and Ubuntu's as they
are installed, it resolves to 127.0.1.1, and gloo has to be told the interface.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from commands import ROOT, blocks_of, documented
from laboratory import needs_root

from bench.netlab import Lab
from bench.netlab.wires import LINK

NAMES = ("first", "second")
OF_THE_LABORATORY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LINES = [command for command in documented() if re.match(r"torchrun .*--nnodes=2.*\.py", command.text)]
SMALL = "--batch=2 --image=32 --warm-up=1 --steps=1 --iterations=1"

pytestmark = [pytest.mark.slow, needs_root]  # two agents start two ranks, which import torch


def on_two_hosts(tmp_path, command, exported=(), names="address"):
    """Run a command on two hosts, HOST being the first one's address; return what has ended.

    Args:
        names: what a host's own name resolves to: its "address", or "loopback".
    """
    training = [code for code in blocks_of(ROOT / "README.md", "python") if "init_process_group" in code]
    (tmp_path / "train.py").write_text(training[0])
    with Lab(2) as lab:
        addresses = [lab.wires.address(host) for host in range(2)]

        def words(host):
            own = addresses if names == "address" else ["127.0.1.1"] * 2
            known = dict(zip(NAMES, addresses, strict=True)) if names == "address" else {}
            known[NAMES[host]] = own[host]
            table = tmp_path / f"hosts{host}"
            table.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in known.items()))
            line = re.sub(r"HOST|10\.[07]\.0\.1", addresses[0], command)
            line = re.sub(r"--nproc_per_node=\d+", "--nproc_per_node=1", line)
            line = re.sub(r"--node_rank=0", f"--node_rank={host}", line)
            line = re.sub(r"(\S*examples/)", f"{ROOT}/examples/", line).replace("--model resnet50", SMALL)
            inside = f"hostname {NAMES[host]}; mount --bind {table} /etc/hosts; cd {tmp_path}; exec {line}"
            here = [f"{name}={LINK}" for name in INTERFACES if any(each.startswith(name) for each in exported)]
            unset = [word for name in (*OF_THE_LABORATORY, *INTERFACES) for word in ("-u", name)]
            return ["env", *unset, *here, "unshare", "--uts", "--mount", "sh", "-c", inside]

        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return lab.run(words, env=env, timeout=100)


@pytest.mark.parametrize("names", ["address", "loopback"])
@pytest.mark.parametrize("command", LINES, ids=lambda command: command.where)
def test_a_documented_line_works_whatever_the_names_of_hosts_resolve_to(tmp_path, command, names):
    """`--rdzv_endpoint` would leave both machines waiting where they are loopback: neither takes HOST for its own."""
    ended = on_two_hosts(tmp_path, shlex.join(command.words), command.exported, names)
    assert ended.statuses == (0, 0), ended.outputs
    assert re.search(r"^loss |images a second$", "".join(ended.outputs), re.MULTILINE)  # of rank 0, on either host


def test_lines_are_documented():
    assert any(command.where == "README.md" for command in LINES)
