"""examples/elastic.py under torchrun, which starts ranks again that were killed, and goes on with other nodes."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from elasticity import EVERY, PROGRAM, elastic, losses, same_losses, undisturbed

pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[1]


class Run:
    """The example under torchrun, which is killed with its ranks when the block ends."""

    def __init__(self, folder, steps, nproc=2, restarts=3, nodes="1", rendezvous=("--standalone",)):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", *rendezvous]
        command += [f"--nproc_per_node={nproc}", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
        command += [PROGRAM, "--folder", folder, "--steps", str(steps), "--every", str(EVERY)]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        printed = Path(tempfile.mkdtemp(dir=folder.parent))
        self.output, self.errors = printed / "output", printed / "errors"
        with self.output.open("w") as output, self.errors.open("w") as errors:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        for pid in [self.process.pid, *self.workers().values()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def lines(self):
        """The lines that were printed so far."""
        return self.output.read_text().splitlines()

    def complaints(self):
        """Return the end of the error output."""
        return "\n".join(self.errors.read_text().splitlines()[-40:])

    def workers(self):
        """Return the processes of the ranks that live: {rank: pid}."""
        found, children = {}, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in map(int, children.read_text().split() if children.exists() else ()):
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                rank = next((each[5:] for each in environment if each.startswith(b"RANK=")), None)
                if rank is not None:
                    found[int(rank)] = pid
        return found

    def wait_for(self, happened, seconds=90):
        """Wait until `happened()`; show the error output if it does not."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert self.process.poll() is None, self.complaints()
            assert time.monotonic() < deadline, (self.lines[-5:], self.complaints())
            time.sleep(0.05)

    def begins(self):
        """Return the steps at which training has begun."""
        return [int(m[1]) for line in self.lines if (m := re.match(r"\d+ ranks begin at step (\d+)", line))]


def listens(port):
    """Return whether somebody answers at this port."""
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow  # four processes import torch, and torchrun does
def test_a_killed_rank_is_started_again_and_nothing_is_lost(tmp_path):
    """Under torchrun one of two ranks is killed: every loss is that of a run that nobody disturbed."""
    steps = 60
    with Run(tmp_path / "killed", steps) as run:
        run.wait_for(lambda: any(line.startswith("step 25 ") for line in run.lines))
        os.kill(run.workers()[1], signal.SIGKILL)
        assert run.process.wait(90) == 0, run.complaints()
    assert run.begins()[0] == 0 and len(run.begins()) == 2 and run.begins()[1] >= 20
    same_losses(run.lines, steps, tmp_path / "whole")
    kept = sorted(path.name for path in (tmp_path / "killed").iterdir())  # rank 0 may have seen the last one unfinished
    assert kept in (["000050", "000060"], ["000040", "000050", "000060"])


@pytest.mark.slow  # twenty times four processes start
@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments(tmp_path):
    """Half of them while the ranks start, half while they train; no step is seen with two losses."""
    chance, folder, held = random.Random(0), tmp_path / "killed", []
    with Run(folder, 10**6, nproc=4, restarts=60) as run:
        for kill in range(20):
            known = len(run.begins())
            if kill % 2:
                run.wait_for(lambda: len(run.begins()) > known)  # noqa: B023
                time.sleep(3 * chance.random())
            else:
                run.wait_for(lambda: len(run.workers()) == 4)
                time.sleep(4 * chance.random())
            workers = run.workers()
            victim = chance.choice(sorted(workers))
            held.append((len(run.begins()), max([0, *dict(elastic().complete(folder))])))
            known = len(run.begins())
            with contextlib.suppress(ProcessLookupError):
                os.kill(workers[victim], signal.SIGKILL)
            run.wait_for(lambda: run.workers().get(victim) != workers[victim])  # noqa: B023
            run.wait_for(lambda: len(run.begins()) > known or len(run.workers()) == 4)  # noqa: B023
        run.wait_for(lambda: len(run.begins()) > known)  # once more, to a checkpoint of its own
        run.wait_for(lambda: next(elastic().complete(folder))[0] > run.begins()[-1])
    begins, found = run.begins(), losses(run.lines)
    assert begins == sorted(begins) and begins[0] == 0 and len(begins) > 10
    assert all(begin >= step for known, step in held for begin in begins[known:])
    assert sorted(found) == list(range(len(found)))
    expected = losses(undisturbed(4, len(found), tmp_path / "whole"))
    assert found == expected

    (at, by), *_ = elastic().complete(folder)
    with Run(folder, at + 2 * EVERY, nproc=2) as again:
        assert again.process.wait(90) == 0, again.complaints()
    assert again.lines[0] == f"2 ranks begin at step {at}, saved by {by}" and by == 4


@pytest.mark.slow  # two torchruns, and what they wait for each other
@pytest.mark.timeout(300)
def test_a_node_that_is_lost_leaves_the_others_to_go_on(tmp_path):
    """`--nnodes=1:2`: the second of two torchruns dies with its ranks, and the first goes on with its own."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    rendezvous = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=1"]
    rendezvous += ["--rdzv_conf=last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=3"]
    folder, options = tmp_path / "shared", {"nodes": "1:2", "rendezvous": rendezvous}
    with Run(folder, 10**6, **options) as first:
        first.wait_for(lambda: listens(port))  # it keeps what both must know
        with Run(folder, 10**6, **options) as second:
            first.wait_for(
                lambda: (
                    any("4 ranks begin" in line for line in [*first.lines, *second.lines])
                    and list(elastic().complete(folder))
                ),
                120,
            )
        first.wait_for(lambda: any(line.startswith("2 ranks begin") for line in first.lines), 120)
        line = next(line for line in first.lines if line.startswith("2 ranks begin"))
    assert line.endswith("saved by 4")
