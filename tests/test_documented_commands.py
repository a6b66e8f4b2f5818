"""Each command that a document names runs here, as small as it goes, or is listed with the reason why it cannot.

A command without a rule fails the first test. What runs does so in a copy of the repository, by the programs of this
environment. Lines for two machines run in tests/bench/test_two_machines.py, on two hosts of the network laboratory.
"""

import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, VARIABLES, Command, blocks_of, documented
from torch.distributed.run import get_args_parser

from bench.netlab import obstacle

TRAIN = "train.py"  # of the reader: the complete script of README.md
EVERY = sorted(set(documented()), key=lambda command: (command.text, command.where))


@dataclasses.dataclass(frozen=True)
class Runs:
    """The command runs, with some arguments more; those that it has already win."""

    more: str = ""


@dataclasses.dataclass(frozen=True)
class Accepted:
    """Only `--help` runs, which names each option of the command."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Looked:
    """Nothing runs: what the command names is there."""

    reason: str


LONG, NO_GPU = "measures for minutes or hours", "needs a GPU"
RULES: list[tuple[str, Runs | Accepted | Looked]] = [
    (r"make [\w-]+.*", Looked("sets up an environment; the target is there")),
    (r"scripts/check", Looked("CI runs it")),
    (r"pip install .*", Looked("needs the network")),
    (r"export .*", Looked("sets variables of the lines below it")),
    (r"python -m baguakit\.store.*", Looked("serves until it is interrupted: tests/elastic/test_store.py runs it")),
    (r"torchrun( --[\w=:-]+)+", Looked("a part of a command")),
    (r"torchrun .*--nnodes=.*", Looked("needs two machines: tests/bench/test_two_machines.py runs it")),
    (
        r"torchrun .*examples/synthetic_benchmark\.py.*",
        Runs("--batch=2 --image=32 --warm-up=1 --steps=1 --iterations=1"),
    ),
    (r"python examples/elastic\.py --endpoint .*", Looked("needs a store; tests/elastic runs it with one")),
    (r"torchrun .*examples/(ddp|fsdp)_8bit\.py.*", Runs("--steps=4 --every=2 --width=32")),
    (
        r"torchrun .*examples/language_model\.py.*",
        Runs("--steps=4 --every=2 --layers=1 --width=32 --heads=2 --context=16 --batch=2"),
    ),
    (r"torchrun .* -m baguakit (probe|demo).*", Looked("tests/command runs it on the ranks of torchrun")),
    (r"torchrun .* -m baguakit plan .*", Looked("needs a model of the reader; tests/command runs it")),
    (
        r"torchrun .*examples/(exact_diffusion|gasloc|cached_dataset|load_balanced_sampler|mixture_of_experts)\.py",
        Runs(),
    ),
    (r"torchrun .* train\.py", Runs()),
    (r"python examples/(cached_dataset|fused_optimizer)\.py", Runs()),
    (r"python examples/rollout\.py.*", Runs("--steps=4 --every=2")),
    (r"python -m bench\.netlab .*-- python train\.py", Runs()),  # as root
    (r"python -m bench\.netlab .*-- .*", Accepted("the same with another program")),
    (r"python -m bench\.network figures", Runs("--out=out")),
    (r"python -m bench\.network\.train .*", Looked("what a laboratory starts on each host")),
    (r"python -m bench\.network.*", Accepted(LONG)),
    (r"python -m bench\.memory", Accepted(LONG)),
    (r"python -m bench\.changed_weights", Runs("--steps=2 --models small --out=out")),
    (r"python -m bench\.first_use", Runs()),
    (r"python -m bench\.roofline --page", Runs()),
    (r"python -m bench\.roofline --predicted.*", Accepted("compiles every kernel; tests/bench runs it")),
    (r"python -m bench\.predicted.*", Accepted("compiles kernels; tests/bench runs what it shows")),
    (r"python -m bench\.roofline.*", Runs("--largest=10 --seconds=30 --out=out")),
    (r"python docs/samples\.py.*", Accepted("takes minutes; tests/test_samples.py runs it")),
    (r"python -m bench\.accuracy --page", Runs()),
    (r"python -m bench\.accuracy.*", Accepted(LONG)),
    (r"python -m bench\.(frontier|elastic) page", Runs()),
    (r"python -m bench\.frontier\.timing .*", Looked("what a laboratory starts on each host")),
    (r"python -m bench\.(frontier|elastic).*", Accepted(LONG)),
    (r"python -m bench\.exchange page", Runs()),
    (r"python -m bench\.exchange.*", Accepted(LONG)),
    (r"python -m bench\.control.*", Accepted("four minutes; tests/bench/test_control.py runs it with fewer ranks")),
    (r"python -m bench\.scaling\.situations", Runs()),
    (r"python -m bench\.scaling\.many one", Runs("--out=out --sizes 8 16")),
    (r"python -m bench\.scaling\.many all", Runs("--out=out --sizes 2 4")),
    (r"python -m bench\.scaling.*", Runs("--out=out")),
    (r"python -m bench\.step_profile", Runs("--cpu --megabytes=1 --out=out")),
    (r"python -m baguakit\.net build", Runs("--out=out")),
    (r"(baguakit|python -m baguakit) doctor", Runs()),
    (r"python -m bench\.speed", Runs()),
    (r"(baguakit|python -m baguakit)( .*)?", Accepted("tests/command runs it")),
    (r"pytest --benchmark bench/bench_data\.py.*", Runs("-k=sampler[10000]")),
    (r"pytest --benchmark bench/bench_optim\.py.*", Runs("-k=bench_fuse")),
    (r"pytest --benchmark.*", Runs("--collect-only -q")),
    (r"pytest --nbmake .*", Runs("--collect-only -q")),
    (r"pytest --ptx .*", Runs("--collect-only -q")),  # tests/kernels/test_executed_here.py runs it
    (r"scripts/test .*", Runs("--collect-only -q")),
    (r"scripts/gpu --list", Runs()),
    (r"scripts/gpu .*", Accepted(NO_GPU)),  # tests/test_gpu_script.py runs it without one
    (
        r"sbatch .*|kubectl .*|docker .*|ssh\.sh .*",
        Looked("needs a cluster: tests/test_clusters.py runs it on loopback"),
    ),
    (r"nox --list", Runs()),
    (r"nox( .*)?", Accepted("takes minutes")),
    (r"python scripts/gpu_\w+\.py.*", Looked(NO_GPU)),
    (r"python scripts/without_cuda\.py .*", Looked("needs a CUDA build of torch; noxfile.py calls it")),
    (r"python scripts/wheel_trial\.py .*", Looked("needs a wheel")),
    (r"python tests/kernels/recording\.py.*", Looked("tests/kernels runs it")),
    (r'python -c ".*nccl.*"', Looked(NO_GPU)),
    (
        r'python -c ".*\bmine\b.*"',
        Looked("needs the module that its page writes; tests/test_checks.py checks its example"),
    ),
    (r'python -c ".*"', Runs()),
]


def rule(command: Command) -> Runs | Accepted | Looked:
    """Return the first rule that fits a command.

    Raises:
        LookupError: none does.
    """
    plain = re.sub(rf"^{VARIABLES}", "", command.text.replace(".venv/bin/", "").removeprefix("sudo "))
    for pattern, how in RULES:
        if re.fullmatch(pattern, plain):
            return how
    raise LookupError(f"{command.where} names `{command.text}`, and no rule in this file says how it is tested")


def of_kind(kind: type) -> list[Command]:
    """Return the commands under a kind of rule, one of those that come to the same."""
    found = {}
    for command in EVERY:
        try:
            how = rule(command)
        except LookupError:
            continue
        if isinstance(how, kind):
            found.setdefault(tuple(smaller(command, how) if kind is Runs else sorted(command.words)), command)
    return list(found.values())


def smaller(command: Command, how: Runs) -> list[str]:
    """Return the words of a command with those of its rule that it has not, for two ranks at most."""
    words = [re.sub(r"^--nproc_per_node=\d+$", "--nproc_per_node=2", word) for word in command.words]
    if words[0] == "torchrun" and "--standalone" not in words:
        words.insert(1, "--standalone")
    return words + [word for word in how.more.split() if word.split("=")[0] not in words]


def test_each_command_has_a_rule():
    assert len(EVERY) > 50
    missing = []
    for command in EVERY:
        try:
            rule(command)
        except LookupError as error:
            missing.append(str(error))
    assert not missing


def test_targets_of_make_are_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {command.words[1] for command in EVERY if command.words[0] == "make"}
    assert named and named <= targets


def test_files_of_commands_are_there():
    named = {word for command in EVERY for word in command.words if re.fullmatch(r"[\w/]+/\w+\.(py|ipynb)", word)}
    assert named and not [path for path in named if not (ROOT / path).exists()]


def test_torchrun_accepts_its_options_and_several_machines_can_meet():
    """Without `--rdzv_backend` torchrun ignores the endpoint, and each machine waits for itself."""
    lines = [command.words[1:] for command in EVERY if command.words[0] == "torchrun"]
    known = get_args_parser()
    meet = 0
    for words in lines:
        script = next((word for word in words if word.endswith(".py") or word == "baguakit"), None)
        if script is None:  # a part of a command
            assert all(word.split("=")[0] in known._option_string_actions for word in words)
            continue
        asked = known.parse_args(words)
        assert asked.training_script == script
        if asked.nnodes != "1:1":
            assert asked.rdzv_backend == "c10d" if asked.rdzv_endpoint else asked.master_addr != "127.0.0.1"
            meet += 1
    assert meet


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory):
    """A copy of the repository, and the complete script of README.md in it."""
    folder = tmp_path_factory.mktemp("documented") / "copy"
    hidden = shutil.ignore_patterns(
        ".venv", ".git", "_build", "__pycache__", ".*_cache", ".hypothesis", "checkpoints", "build"
    )
    shutil.copytree(ROOT, folder, ignore=hidden)
    scripts = [code for code in blocks_of(ROOT / "README.md", "python") if "init_process_group" in code]
    (folder / TRAIN).write_text(scripts[0])
    return folder


def run(words, folder, **variables):
    """Run a command by the programs of this environment."""
    here = str(Path(sys.executable).parent)
    if words[0] == "baguakit" and not Path(here, "baguakit").exists():  # the package is not installed, only importable
        words = ["python", "-m", *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of pytest-xdist
    env |= {"PATH": f"{here}:{os.environ['PATH']}", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words, cwd=folder, env=env | variables, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.timeout(330)
@pytest.mark.slow  # most start ranks, which import torch; some compile
@pytest.mark.parametrize("command", of_kind(Runs), ids=lambda command: command.text)
def test_it_runs(command, sandbox):
    if "bench.netlab" in command.words and (reason := obstacle()):
        pytest.skip(reason)
    variables = dict(pair.split("=", 1) for pair in command.exported)
    for written in ("checkpoints", "out"):  # by another command
        shutil.rmtree(sandbox / written, ignore_errors=True)
    ran = run(smaller(command, rule(command)), sandbox, **variables)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "Traceback" not in ran.stderr


@functools.cache
def help_of(program, folder):
    ran = run([*program, "--help"], folder)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


@pytest.mark.slow  # each program imports torch
@pytest.mark.parametrize("command", of_kind(Accepted), ids=lambda command: command.text)
def test_its_options_are_accepted(command, sandbox):
    words = command.words
    program = words[: 3 if words[1:2] == ["-m"] else 2 if words[0] == "python" else 1]
    while re.fullmatch(r"[a-z]+", "".join(words[len(program) : len(program) + 1])):
        commands = re.search(r"\{([\w,]+)\}", help_of(tuple(program), sandbox))
        assert commands and words[len(program)] in commands[1].split(",")
        if {"bench.network", "bench.frontier", "bench.elastic"} & set(words):
            break  # there it is an argument, and has no help of its own
        program = words[: len(program) + 1]
    text = help_of(tuple(program), sandbox)
    assert not [option for option in command.options if option not in text]


@pytest.mark.slow  # each program imports torch
def test_programs_for_torchrun_say_so_without_it(sandbox):
    scripts = {word for command in EVERY for word in command.words if re.match(r"examples/.*\.py$", word)}
    alone = {word for command in EVERY if command.words[0] == "python" for word in command.words}
    ranks = sorted(scripts - alone)
    assert len(ranks) > 3
    for script in ranks:
        needed = ["--folder", "out"] if "--folder" in (ROOT / script).read_text() else []
        ran = run(["python", script, *needed], sandbox)
        assert ran.returncode != 0 and "start it with torchrun" in ran.stderr and "Traceback" not in ran.stderr, script
