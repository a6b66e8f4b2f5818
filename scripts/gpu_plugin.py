"""Let NCCL load our network plugin, and see what it does with it.

    python scripts/gpu_plugin.py FACTS [--cpu] [--megabytes 64]

Two ranks, on one GPU if there is no second. Cells, each written when it ends:

    messages       sums, and messages between two ranks, of 1 to 4 Mi values, and in groups that come and go
    second life    all communicators end, and the next are made: does NCCL still use the plugin?
    kill           rank 1 is killed, and rank 0 names it
    rates          bytes a second of a message under a cap on each connection: the plugin with 1 and 8 streams, beside
                   NCCL's sockets with 1 and 8 for each connection

The network that NCCL names is read from its own log. Ends with 1 if values are wrong, the dead rank is not named, or,
on a GPU, another network is named than the plugin in the first two cells and its own two rates. Without a GPU the ranks
speak over gloo, and a Comm with as many flows stands for streams and sockets.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_pair import heard

ROOT = Path(__file__).resolve().parents[1]
OURS, SOCKETS = "baguanet", "Socket"
CAP = 50e6  # bytes a second of each connection
TIMES = 3  # a message is timed


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("facts", type=Path)
    parser.add_argument("--cpu", action="store_true", help="over gloo")
    parser.add_argument("--megabytes", type=float, default=64.0, help="of the message that is timed")
    asked = parser.parse_args(words)
    from baguakit.net import build

    cuda, values = not asked.cpu, int(asked.megabytes * 2**18)
    plugin = {"NCCL_NET_PLUGIN": str(build()), "NCCL_NET_PLUGIN_REF_COUNT": "1", "NCCL_SOCKET_IFNAME": "lo"}
    cells: dict[str, Callable[[], Any]] = {
        "messages": lambda: seen(messages, cuda, plugin),
        "second life": lambda: seen(second_life, cuda, plugin),
        "kill": lambda: killed(cuda, plugin),
    }
    for n in (1, 8):
        ours, theirs = plugin | {"BAGUANET_STREAMS": str(n)}, sockets(n)
        cells[f"{OURS}, {n} streams"] = lambda n=n, e=ours: seen(rate, cuda, e, n, values)
        cells[f"NCCL's own, {n} sockets"] = lambda n=n, e=theirs: seen(rate, cuda, e, n, values)
    found: dict[str, Any] = {"cap": CAP, "megabytes": asked.megabytes}
    for name, cell in cells.items():
        try:
            found[name] = cell()
        except Exception as error:
            found[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"[-600:]}
        if cuda and "networks" in found[name]:
            found[name]["ok"] &= found[name]["networks"] == [SOCKETS if "sockets" in name else OURS]
        print(json.dumps({name: found[name]}), flush=True)
        asked.facts.write_text(json.dumps(found))
    return int(not all(found[name]["ok"] for name in cells))


def sockets(n: int) -> dict[str, str]:
    """Return the environment in which NCCL opens n sockets of its own for a connection."""
    own = {"NCCL_NET_PLUGIN": "none", "NCCL_SOCKET_IFNAME": "lo"}
    return own | {"NCCL_SOCKET_NTHREADS": "1", "NCCL_NSOCKS_PERTHREAD": str(n)}


def seen(work: Callable[..., Any], cuda: bool, environment: Mapping[str, str], *arguments: Any) -> dict[str, Any]:
    """Do some work on two new ranks, and return what they found and what NCCL has said meanwhile."""
    from baguakit.ranks import Ranks

    with tempfile.TemporaryDirectory() as room:
        added = {**environment, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{room}/%p"}
        before = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            with Ranks(2, cuda=cuda, timeout=60) as ranks:
                facts = ranks.run(work, cuda, *arguments, limit=60.0 if cuda else 600.0)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        lines = [line for path in Path(room).iterdir() for line in path.read_text(errors="replace").splitlines()]
    said = heard(lines)
    return {"ok": all(each.pop("ok") for each in facts), **facts[0], **{k: said[k] for k in ("networks", "NCCL warns")}}


def killed(cuda: bool, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what rank 0 says of rank 1, which is killed: see gpu_peer.py."""
    with tempfile.TemporaryDirectory() as room:
        command = ["scripts/gpu_peer.py", f"{room}/facts", "--after", "0", *["--cpu"] * (not cuda)]
        ran = subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE)
        facts = json.loads(Path(f"{room}/facts").read_text())
    return {"ok": ran.returncode == 0, "sentence": facts["sentence"], "seconds": facts["seconds to the sentence"]}


def messages(cuda: bool) -> dict[str, Any]:
    """Sums and messages of several sizes, in the group of all and in groups that come and go."""
    import torch.distributed as dist

    ok = right(cuda, None)
    for _ in range(3):
        group = dist.new_group()
        ok &= right(cuda, group)
        dist.barrier(group)
        dist.destroy_process_group(group)
    return {"ok": ok}


def second_life(cuda: bool) -> dict[str, Any]:
    """The same before and after all communicators have ended; NCCL's log tells the network of both."""
    import torch.distributed as dist

    ok = right(cuda, None)
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(f"{os.environ['NCCL_DEBUG_FILE'].removesuffix('/%p')}/store", 2)
    rank = int(os.environ["RANK"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=2)
    ok &= right(cuda, None)
    dist.barrier()
    return {"ok": ok}


def right(cuda: bool, group: Any) -> bool:
    """Return whether sums over two ranks, and messages between them, are right."""
    import torch
    import torch.distributed as dist

    rank, ok = dist.get_rank(), True
    for n in (1, 1000, 1 << 22):
        x = torch.full((n,), rank + 1.0, device="cuda" if cuda else "cpu")
        y = torch.empty_like(x)
        pair = [dist.P2POp(dist.isend, x, 1 - rank, group), dist.P2POp(dist.irecv, y, 1 - rank, group)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        ok &= bool((y == 2 - rank).all())
        dist.all_reduce(x, group=group)
        ok &= bool((x == 3).all())
    return ok


def rate(cuda: bool, flows: int, values: int) -> dict[str, Any]:
    """Time a message from each of two ranks to the other, with a cap on every connection of this process."""
    import torch

    import baguakit as bk
    from baguakit.compare.pacing import at, cap, connections

    comm = bk.Comm(flows=1 if cuda else flows)
    x, rank = torch.full((values,), comm.rank + 1.0, device="cuda" if cuda else "cpu"), comm.rank
    comm.exchange(x, [1 - rank], [1 - rank])
    there = connections().values()  # those of gloo and of the store, too
    for fd in there:
        with at(fd) as one:
            cap(one, CAP)
    seconds = []
    for _ in range(TIMES):
        comm.gather_objects(None)
        began = time.perf_counter()
        received = comm.exchange(x, [1 - rank], [1 - rank])[1 - rank]
        if cuda:
            torch.cuda.synchronize()
        seconds.append(max(comm.gather_objects(time.perf_counter() - began)))
    found = {"bytes a second": x.nbytes / sorted(seconds)[TIMES // 2], "sockets": len(there)}
    return {"ok": bool((received == 2 - rank).all()), **found}


if __name__ == "__main__":
    import gpu_plugin  # without cloudpickle, ranks find a function by the name of its module

    sys.exit(gpu_plugin.main(sys.argv[1:]))
