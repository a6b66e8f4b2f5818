"""The files of a release, looked at and tried: `scripts/wheel` calls it.

python scripts/wheel_trial.py DIST FOLDER       # the sdist and the wheel in DIST; FOLDER is outside the checkout
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
FILES = re.compile(
    r"https://(?:github\.com/baguakit/baguakit/blob|raw\.githubusercontent\.com/baguakit/baguakit)/v[^/]+/"
)
TRAIN = """
import sys
import torch
import torch.distributed as dist
import baguakit as bk

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with bk.attach(model, optimizer, bk.algorithms.bytegrad()) as att:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    assert att.consensus_distance() == 0
    if dist.get_rank() == 0:
        print(bk.__version__, bk.__file__, att.report(), sep="\\n")
dist.barrier()
dist.destroy_process_group()
"""


def wanted(requirement: str) -> set[str]:
    """Return the names of the packages that a requirement installs here: its own, and those that it requires."""
    names, ahead = set(), [Requirement(requirement)]
    while ahead:
        each = ahead.pop()
        if each.name in names or not (each.marker is None or each.marker.evaluate({"extra": ""})):
            continue
        names.add(each.name)
        ahead += [Requirement(text) for text in distribution(each.name).requires or ()]
    return names


def check_sdist(sdist: Path) -> set[str]:
    """Return the names of the files in the sdist; it has every file of the repository, and one more."""
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    missing = set(listed.splitlines()) - packed
    if missing or "PKG-INFO" not in packed:
        raise SystemExit(f"{sdist.name} lacks {', '.join(sorted(missing)) or 'PKG-INFO'}")
    return packed


def check_page(wheel: Path, files: set[str]) -> list[str]:
    """Return the requirements of the wheel; every link of its page for the index leads somewhere."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        page = message_from_bytes(archive.read(name))
    folders = {str(parent) for file in files for parent in Path(file).parents}
    links = [first or second for first, second in LINK.findall(page.get_payload(decode=True).decode())]
    wrong = [link for link in links if not link.startswith(("https://", "#"))]
    wrong += [link for link in links if FILES.match(link) and FILES.sub("", link).split("#")[0] not in files | folders]
    if wrong or not any(map(FILES.match, links)):
        raise SystemExit(f"links of {wheel.name} that lead nowhere: {', '.join(wrong) or 'it has none to files'}")
    return page.get_all("Requires-Dist", [])


def environment(folder: Path, wheel: Path, requirements: list[str]) -> Path:
    """Return the Python of a new environment with the wheel.

    What the wheel requires is linked to from this environment: to download torch again would take minutes. pip finds
    it installed, and fails if anything is missing, since it may not look elsewhere.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    [site] = (folder / "env" / "lib").glob("python3.*/site-packages")
    for name in sorted(set().union(*(wanted(each) for each in requirements if "extra ==" not in each))):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", wheel.resolve()]
    subprocess.run(pip, check=True)
    return python


def main(dist: Path, folder: Path) -> None:
    """Look at the files in `dist`, and train with the wheel in `folder`."""
    [sdist], [wheel] = dist.glob("*.tar.gz"), dist.glob("*.whl")
    files = check_sdist(sdist)
    python = environment(folder, wheel, check_page(wheel, files))
    (folder / "train.py").write_text(TRAIN)
    run = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    ran = subprocess.run(run, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    print(ran.stdout)
    if str(folder.resolve()) not in ran.stdout:
        raise SystemExit("the program has not used the wheel")
    # The command, without the packages that make its tables coloured; it fails where two ranks cannot meet.
    subprocess.run([python.with_name("baguakit"), "doctor"], cwd=folder, check=True)
    print(f"{sdist.name}: {len(files)} files; {wheel.name}: two ranks have trained with it")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
