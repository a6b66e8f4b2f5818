"""examples/elastic.py: whoever is killed, all go on from the newest complete checkpoint as if nothing had been."""

import contextlib
import importlib.util
import io
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pool import ranks

pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "examples" / "elastic.py"
EVERY = 10  # steps between checkpoints


def elastic():
    """The example, as a module."""
    spec = importlib.util.spec_from_file_location("elastic", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def undisturbed(n, steps, folder):
    """What rank 0 prints in a run that nobody kills."""

    def run():
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            elastic().train(Path(folder), steps, EVERY)
        return said.getvalue()

    return ranks(n, run)[0].splitlines()


def losses(lines):
    """What was printed of every step, all of it."""
    found = {}
    for line in lines:
        if match := re.match(r"step (\d+) loss (\S+)$", line):
            found.setdefault(int(match[1]), set()).add(match[2])
    return found


class Run:
    """The example under torchrun; `lines` grows while it goes."""

    def __init__(self, folder, steps, nproc=2, restarts=3, nodes="1", rendezvous=("--standalone",)):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", *rendezvous]
        command += [f"--nproc_per_node={nproc}", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
        command += [PROGRAM, "--folder", folder, "--steps", str(steps), "--every", str(EVERY)]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines, self.complaints = [], []
        self.threads = [
            threading.Thread(target=read, args=(self.process.stdout, self.lines), daemon=True),
            threading.Thread(target=read, args=(self.process.stderr, self.complaints), daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def workers(self):
        """The processes of the ranks that live: {rank: pid}."""
        found = {}
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                rank = next((each[5:] for each in environment if each.startswith(b"RANK=")), None)
                if rank is not None:
                    found[int(rank)] = pid
        return found

    def wait_for(self, happened, seconds=90):
        """Wait until `happened()`; what the ranks complained of, if it does not."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert self.process.poll() is None, "\n".join(self.complaints[-40:])
            assert time.monotonic() < deadline, (self.lines[-5:], "\n".join(self.complaints[-40:]))
            time.sleep(0.01)

    def begins(self):
        """The steps at which training has begun."""
        return [int(m[1]) for line in self.lines if (m := re.match(r"\d+ ranks begin at step (\d+)", line))]

    def ends(self, seconds=90):
        """Wait for its end and return its exit status."""
        status = self.process.wait(seconds)
        for thread in self.threads:
            thread.join(5)
        return status

    def kill(self):
        """End torchrun and its ranks."""
        for pid in [self.process.pid, *self.workers().values()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.ends()
        self.process.stdout.close()
        self.process.stderr.close()


def read(stream, lines):
    lines += (line.rstrip("\n") for line in stream)


def listens(port):
    """Whether somebody answers at this port."""
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@contextlib.contextmanager
def started(*arguments, **options):
    run = Run(*arguments, **options)
    try:
        yield run
    finally:
        run.kill()


def test_a_killed_rank_is_started_again_and_nothing_is_lost(tmp_path):
    """Under torchrun one of two ranks is killed: every loss is that of a run that nobody disturbed."""
    steps = 60
    with started(str(tmp_path / "killed"), steps) as run:
        run.wait_for(lambda: any(line.startswith("step 25 ") for line in run.lines))
        os.kill(run.workers()[1], signal.SIGKILL)
        assert run.ends() == 0, "\n".join(run.complaints[-40:])
    assert run.begins()[0] == 0 and len(run.begins()) == 2 and run.begins()[1] >= 20
    found, expected = losses(run.lines), losses(undisturbed(2, steps, tmp_path / "whole"))
    assert found == expected and len(found) == steps and all(len(each) == 1 for each in found.values())
    kept = sorted(path.name for path in (tmp_path / "killed").iterdir())  # rank 0 may have seen the last one unfinished
    assert kept in (["000050", "000060"], ["000040", "000050", "000060"])


def test_a_checkpoint_counts_once_all_its_files_are_there(tmp_path):
    program = elastic()
    for name in (
        "000010/0-of-1.pt",
        "000020/0-of-2.pt",
        "000020/1-of-2.pt",
        "000030/0-of-2.pt",
        "000030/1-of-2.tmp",
        "000030/1-of-3.pt",
        "000040/1-of-2.pt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(program.complete(tmp_path)) == [(20, 2), (10, 1)]
    assert ranks(2, lambda: elastic().newest(tmp_path)) == [(20, 2)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000010", "000020"]


def test_a_part_is_there_whole_or_not_at_all(tmp_path):
    """A rank that dies while it writes leaves no file by the name that is read."""

    def run():
        import torch.distributed as dist

        class Dies:
            def __reduce__(self):
                raise OSError("no space left")

        program = elastic()
        program.save(tmp_path, 10, {"x": 1})
        dist.barrier()
        if dist.get_rank() == 1:
            with pytest.raises(OSError, match="no space left"):
                program.save(tmp_path, 20, {"x": 2, "y": Dies()})
        else:
            program.save(tmp_path, 20, {"x": 2})
        dist.barrier()
        return list(program.complete(tmp_path))

    assert ranks(2, run) == [[(10, 2)]] * 2
    assert {path.name for path in (tmp_path / "000020").glob("*.pt")} == {"0-of-2.pt"}


def test_other_numbers_of_ranks_go_on(tmp_path):
    """Four ranks, then two, then three: each begins where the others ended."""
    said = [undisturbed(n, steps, tmp_path)[0] for n, steps in ((4, 20), (2, 40), (3, 60))]
    assert said == [
        "4 ranks begin at step 0, saved by 0",
        "2 ranks begin at step 20, saved by 4",
        "3 ranks begin at step 40, saved by 2",
    ]


@pytest.mark.slow  # twenty times four processes start
@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments(tmp_path):
    """Half of them while the ranks start, half while they train; no step is seen with two losses."""
    chance, folder, held = random.Random(0), tmp_path / "killed", []
    with started(str(folder), 10**6, nproc=4, restarts=60) as run:
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
    with started(str(folder), at + 2 * EVERY, nproc=2) as again:
        assert again.ends() == 0, "\n".join(again.complaints[-40:])
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
    options = {"nodes": "1:2", "rendezvous": rendezvous}
    with started(str(tmp_path), 10**6, **options) as first:
        first.wait_for(lambda: listens(port))  # it keeps what both must know
        with started(str(tmp_path), 10**6, **options) as second:
            first.wait_for(
                lambda: (
                    any("4 ranks begin" in line for line in [*first.lines, *second.lines])
                    and list(elastic().complete(tmp_path))
                ),
                120,
            )
        first.wait_for(lambda: any(line.startswith("2 ranks begin") for line in first.lines), 120)
        line = next(line for line in first.lines if line.startswith("2 ranks begin"))
    assert line.endswith("saved by 4")
