"""Processes that train in a group of `bk.elastic`, step by step as a test tells them, and are killed where it says.

They are forked from a process that has imported the package, so that one more costs milliseconds.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import sys
import zlib
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import late_device
import torch
import torch.distributed as dist
from everything import NAMES
from torch import nn

import baguakit as bk
from baguakit.attach.engine import Engine
from baguakit.elastic import rounds
from baguakit.elastic.carrying import Carrying
from baguakit.elastic.doors import SILENT, Knocks
from baguakit.elastic.membership import Membership
from baguakit.flights import gradients, runner
from baguakit.monitor import PeerError
from bench.netlab import LINK, enter

PR_SET_PDEATHSIG = 1  # of Linux: a signal at the death of the parent, the process from which all are forked
context = multiprocessing.get_context("forkserver")
PATIENCE = 60.0  # seconds after which a test has failed
SHAPES = ((4, 8), (16,), (5, 5), (7,))


class Told:
    """Is due when the test says so: `every=READY` of an algorithm."""

    now = False

    def due(self, step: int, comm: bk.Comm) -> bool:
        return self.now

    def __repr__(self) -> str:
        return "READY"


READY = Told()
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer of a process imports for seconds


def fork_from_one_that_has_imported() -> None:
    """Start the process from which others are forked; before Python 3.14 it does not take over `sys.path`."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    context.set_forkserver_preload(["crew"])
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


class Quadratic(nn.Module):
    """½ ‖x − c‖², whose gradient is x − c, with a buffer that counts the forward passes."""

    def __init__(self) -> None:
        super().__init__()
        # Layers, for fragments.
        self.parts = nn.ModuleList([nn.ParameterList([torch.zeros(shape)]) for shape in SHAPES])
        self.passes: torch.Tensor
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, c: list[torch.Tensor]) -> torch.Tensor:
        self.passes += 1
        return sum((0.5 * (x - each).square().sum() for (x,), each in zip(self.parts, c, strict=True)), torch.zeros(()))


def centre(name: str, step: int) -> list[torch.Tensor]:
    """The batch of a process at a step: small whole numbers, so that means over 2 or 4 ranks are exact."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{step}".encode()))
    return [torch.randint(-8, 9, shape, generator=generator).float() for shape in SHAPES]


def serve(end: Any, host: str, namespace: Path | None) -> None:
    """Be the store."""
    if namespace is not None:
        enter(namespace)
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    end.send(f"{host}:{port}")
    with contextlib.suppress(EOFError):
        end.recv()
    del store


def train(end: Any, store: str, name: str, algorithm: str, options: dict[str, Any]) -> None:
    """Train as `Process` says."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it might be making 10⁹ steps when the tests end
    if namespace := options.pop("namespace", None):
        enter(namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = LINK
    rounds.SLOWEST_MESSAGE = timedelta(seconds=20)  # so long a thread may wait for a rank that was killed
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = options.pop("device", "cpu")
    if device == "cuda":  # that several processes share
        os.environ.update(NCCL_HOSTID=name, NCCL_ALGO="Ring", NCCL_PROTO="Simple", NCCL_SOCKET_IFNAME="lo")
    elif device == "late":
        late_device.install()
    model, rate = Quadratic().to(device), options.pop("lr", 0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=options.pop("momentum", 0.0))
    timeout, waits = options.pop("timeout", 30.0), options.pop("waits", False)
    number = 1.0 + zlib.crc32(name.encode()) % 3  # of tokens in each step
    weight = {"": None, "number": number, "function": lambda: number}[options.pop("weight", "")]
    dies_told, gathers = options.pop("dies_told", 0), options.pop("gathers", False)
    if dies := options.pop("dies", ""):
        die_at(dies, model, optimizer)
    changes: list[Any] = []
    present: dict[int, list[int]] = {}  # processes, by step
    try:
        comm = bk.elastic.join(store, **{"least": 1, "patience": PATIENCE} | options)
        end.send(("joined", comm.rank, comm.size))
        if waits:
            end.recv()
        options = {"comm": comm, "timeout": timeout, "bucket_bytes": 100, "weight": weight}
        with bk.attach(model, optimizer, eval(algorithm, {**NAMES, "READY": READY}), **options) as att:
            att.on_regroup(changes.append)
            if dies_told:  # in its first callback; both are collective
                att.on_regroup(lambda change: die_at("now") if change.ranks == dies_told else comm.gather_objects(1))
            elif gathers:
                att.on_regroup(lambda change: end.send(("told", comm.gather_objects(1))))
                att.on_regroup(lambda change: end.send(("told", comm.gather_objects(2))))

            def said() -> dict[str, Any]:
                found = {"step": att.step, "rank": comm.rank, "ranks": att.ranks, "passes": int(model.passes)}
                found["present"] = dict(present)
                found["weights"] = torch.cat([x.detach().flatten() for x in model.parameters()]).cpu()
                found["momentum"] = [s["momentum_buffer"].clone().cpu() for s in optimizer.state.values() if s]
                return found | {"changes": list(changes)}

            def step() -> None:
                members = pids(comm)
                with att.recoverable():
                    at = att.step
                    optimizer.zero_grad()
                    model([c.to(device) for c in centre(name, at)]).backward()
                    try:
                        optimizer.step()
                    finally:
                        if att.step > at:  # it is made, even if a rank is lost right after it
                            present[at] = members

            end.send(("attached", said()))
            while (order := end.recv())[0] != "end":
                if order[0] == "die":
                    die_at(order[1], model, optimizer)
                elif order[0] == "cut":
                    cut_from(order[1], comm.membership)
                elif order[0] == "ready":
                    READY.now = order[1]
                elif order[0] == "round":  # of a free-running rule: its number, its anchor, and whether it flies
                    runner = att._life.free.paces[0].runner
                    held = att.state_dict()["rules"]["0"]["parameters"]
                    anchor = torch.cat([held[name]["anchor"].flatten() for name, _ in model.named_parameters()])
                    end.send(("round", (runner.round, anchor, bool(runner.air))))
                elif order[0] == "leave":
                    att.leave()
                elif order[0] == "hang":
                    with att.recoverable():
                        end.recv()
                    end.send(("stepped", said()))
                elif order[0] == "collective":
                    with att.recoverable():
                        comm.gather_objects(name)
                    end.send(("stepped", said()))
                elif order[0] == "state":
                    end.send(("state", att.state_dict()))
                elif order[0] in ("gather", "return", "together"):
                    number = comm.membership.round.number if order[0] == "return" else 0  # from a round that is lost
                    of = set if order[0] == "together" else len
                    while comm.membership.round.number == number or of(pids(comm)) != order[1]:
                        step()
                    end.send(("stepped", said()))
                elif order[0] == "edges":
                    states = [state for runner in att._life.runners for state in runner.states]
                    held = [state["window"] for state in states if state]
                    end.send(("edges", [(sorted(each._links.edges), each.lost) for each in held]))
                elif order[0] == "resources":
                    end.send(("resources", resources()))
                else:
                    until = att.step + order[1]
                    while att.step < until:
                        step()
                    end.send(("stepped", said()))
        hooks = [optimizer._optimizer_step_pre_hooks, *(p._post_accumulate_grad_hooks for p in model.parameters())]
        assert not any(hooks), "detach() has left hooks"
        end.send(("ended", threads()))
    except bk.elastic.Left:
        end.send(("left", None))
    except BaseException as error:
        end.send(("raised", type(error).__name__, str(error)))
        raise


def pids(comm: bk.Comm) -> list[int]:
    """The processes of the present round."""
    return [int(member.name.split(":")[1]) for member in comm.membership.round.members]


def resources() -> dict[str, Any]:
    """Return what this process holds: threads by name, descriptors, and mappings of shared memory."""
    gc.collect()  # a thread of a round may end, and leave a cycle, after the collection with which each round begins
    with open("/proc/self/maps") as maps:
        shared = sum("/dev/shm" in line for line in maps)
    return {"threads": threads(), "descriptors": len(os.listdir("/proc/self/fd")), "shared": shared}


def threads() -> list[str]:
    """The threads of the package that live."""
    import threading

    return sorted(each.name for each in threading.enumerate() if each.name.startswith(("baguakit", "Rendezvous")))


INNER = {"meeting": (Membership, "meet"), "carrying": (Carrying, "fill"), "saving": (Engine, "state_dict")}


def die_at(moment: str, model: Any = None, optimizer: Any = None) -> None:
    """Let this process be killed, at once or later in its next step."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "backward":  # of the last parameter but one: some buckets fly
        list(model.parameters())[1].register_hook(die)
    elif moment == "flight":
        flights: list[int] = []

        def second(call: Any) -> Any:
            def fly(*args: Any) -> Any:
                flights.append(1)
                return call(*args) if len(flights) < 2 else die()

            return fly

        gradients.call_stage = runner.call_stage = second(runner.call_stage)
        gradients.in_phases = runner.in_phases = second(runner.in_phases)
    elif moment in INNER:
        setattr(*INNER[moment], die)
    elif moment == "optimizer":
        optimizer.register_step_pre_hook(die)
    elif moment == "stepped":
        optimizer.register_step_post_hook(die)
    else:
        die()


class Process:
    """A process that trains."""

    def __init__(self, store: str, name: str, algorithm: str, options: dict[str, Any]) -> None:
        self.name = name
        self.end, there = context.Pipe()
        self.process = context.Process(target=train, args=(there, store, name, algorithm, options), daemon=True)
        self.process.start()
        there.close()

    def hear(self, what: str) -> Any:
        """Wait for a message of a kind, and return what it says; earlier ones of other kinds are dropped."""
        while True:
            if not self.end.poll(PATIENCE):
                raise TimeoutError(f"{self.name} has not said {what!r} within {PATIENCE:g} s")
            said = self.end.recv()
            if said[0] == what:
                return said[1] if len(said) == 2 else said[1:]
            if said[0] == "raised" != what:
                raise AssertionError(f"{self.name} raised {said[1]}: {said[2]}")

    def tell(self, *order: Any) -> None:
        """Give an order."""
        self.end.send(order)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join()


class Crew:
    """A store, and the processes that find each other there."""

    def __init__(self, algorithm: str, host: str = "127.0.0.1", namespace: Path | None = None, **options: Any) -> None:
        fork_from_one_that_has_imported()
        self.algorithm, self.options, self.processes = algorithm, options, list[Process]()
        self.end, there = context.Pipe()
        self.store = context.Process(target=serve, args=(there, host, namespace), daemon=True)
        self.store.start()
        self.address = self.end.recv()

    def start(self, *names: str, **options: Any) -> list[Process]:
        """Start processes, which join."""
        algorithm = options.pop("algorithm", self.algorithm)
        new = [Process(self.address, name, algorithm, self.options | options) for name in names]
        self.processes += new
        return new

    def close(self) -> None:
        """End all processes."""
        for each in self.processes:
            each.kill()
        self.store.kill()
        self.store.join()


@contextlib.contextmanager
def crew(algorithm: str, *where: Any, **options: Any) -> Any:
    """A crew that ends with the body."""
    made = Crew(algorithm, *where, **options)
    try:
        yield made
    finally:
        made.close()


def gather(some: list[Process]) -> list[dict[str, Any]]:
    """Let processes make steps until all of them, and no others, are in the group."""
    for each in some:
        each.hear("attached")
        each.tell("gather", len(some))
    return [each.hear("stepped") for each in some]


def step(some: list[Process], steps: int = 1) -> list[dict[str, Any]]:
    """Let processes make steps, and return what they say then."""
    for each in some:
        each.tell("step", steps)
    return [each.hear("stepped") for each in some]


def cut_from(pid: int, membership: Any) -> None:
    """Let this process not reach one of its round any more: its door does not answer, and no round begins with it."""
    doors = {member.door for member in membership.round.members if f":{pid}:" in member.name}
    knock, fill = Knocks.knock, Carrying.fill

    def fails(carrying: Carrying) -> None:
        if any(member.door in doors for member in membership.round.members):
            raise PeerError(f"{pid} cannot be reached")
        fill(carrying)

    Knocks.knock = lambda knocks, door: SILENT if door in doors else knock(knocks, door)  # type: ignore[method-assign]
    Carrying.fill = fails  # type: ignore[method-assign]
    membership.broken(membership.round, f"{pid} cannot be reached")
