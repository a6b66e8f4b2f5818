"""Every number on the front page is one of the results in bench/results, or says a condition and not a result."""

import json
import re
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from baguakit.compare.language import GPT
from bench.frontier import compose, page, picture, trajectories
from bench.network.table import RESULTS, Table

ROOT = Path(__file__).parents[2]
LOSSES, TIMINGS = Table(trajectories.PATH), Table(page.TIMINGS)


@cache
def rows(hosts):
    return {row.contender.name: row for row in compose.rows(LOSSES, TIMINGS, picture.NETWORK, hosts)}


def goal(hosts=4):
    return compose.targets(LOSSES, hosts)[-1]


def sooner(name, hosts=4, seeds=3):
    found = rows(hosts)
    assert len(found[name].curves) == seeds and len(found["DDP"].curves) == (3 if hosts == 4 else 1)
    return picture.times(found["DDP"].seconds(goal(hosts)) / found[name].seconds(goal(hosts)))


def fewer_bytes(name, beside):
    return round(rows(4)[beside].bytes(goal()) / rows(4)[name].bytes(goal()))


@cache
def real():
    found = json.loads((RESULTS / "gpu-h200.json").read_text())
    return found["parts"]["real"]["found"] | {"date": found["machine"]["date"]}


def seconds(name, rate):
    [cell] = [cell for cell in real()["cells"] if (cell["contender"], cell["rate"]) == (name, rate)]
    taken = median(cell["seconds"])
    return f"{taken:.2f}" if rate == "10gbit" else f"{taken:.1f}"


def steps_of(rate):
    names = ("DDP", "bf16 hook", "bytegrad", "bytegrad 4 bits", "PowerSGD hook")
    return " | ".join(seconds(name, rate) for name in names)


def copies(algorithm):
    found = json.loads((RESULTS / "memory-cpu.json").read_text())["rows"]
    return f"{next(row['copies'] for row in found if row['algorithm'] == algorithm):.1f}"


def cores():
    [found] = {on["cores"] for on in [*LOSSES.machines, *TIMINGS.machines]}
    return {2: "two"}[found]


def dates():
    found = sorted(on["date"] for on in [*LOSSES.machines, *TIMINGS.machines])
    return f"{found[0]} to {found[-1]}"


def model():
    cell, _ = next(iter(LOSSES))
    values = sum(p.numel() for p in GPT(cell["layers"], cell["width"], cell["heads"]).parameters())
    return f"{values / 1e6:.1f}"


def pythons():
    found = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    return f"{found[0]} to {found[-1]}"


def torches():
    text = (ROOT / "docs" / "status.md").read_text()
    found = {tuple(map(int, one.split("."))) for one in re.findall(r"torch (2\.\d+)\.\d", text)}
    return " to ".join(".".join(map(str, one)) for one in (min(found), max(found)))


CLAIMS = [
    lambda: (
        f"A language model of {model()} million values on four or eight hosts, "
        f"emulated on one machine of {cores()} cores"
    ),
    lambda: (
        f"links of {picture.NETWORK}. How much sooner than DDP it reaches the loss that DDP has after "
        f"{trajectories.MADE.steps} steps"
    ),
    lambda: (
        f"| {4} hosts, mean of {len(trajectories.SEEDS)} seeds | "
        + " | ".join(map(sooner, ("bytegrad", "bytegrad, 4 bits", "diloco, 4 bits", "MuLoCo")))
    ),
    lambda: "| 8 hosts, 1 seed | " + " | ".join(sooner(name, 8, 1) for name in ("bytegrad", "bytegrad, 4 bits")),
    lambda: f"{sooner('diloco, 4 bits', 8, 1)} in {trajectories.MADE.longest:,} steps | {sooner('MuLoCo', 8, 1)} |",
    lambda: (
        f"with 4 hosts and 1 seed, DDP's PowerSGD hook is {sooner('DDP, PowerSGD hook', seeds=1)} faster "
        f"(our `power_sgd()`: {sooner('power_sgd', seeds=1)})"
    ),
    lambda: (
        f"torchft's DiLoCo {sooner('torchft, DiLoCo', seeds=1)} "
        f"(ours, with its outer step: {sooner('diloco', seeds=1)})"
    ),
    lambda: f"MuLoCo sends a {fewer_bytes('MuLoCo', 'DDP')}th of the bytes of DDP with AdamW",
    lambda: f"a {fewer_bytes('MuLoCo', 'DDP, Muon')}st of those of DDP with Muon",
    lambda: f"all algorithms](bench/frontier/README.md), {dates()}",
    lambda: f"A GPT of {real()['values'] // 10**6} million values in bf16, four ranks over NCCL on one H200",
    lambda: f"each limited to 1 Gb/s. Seconds a step ([all figures](bench/README.md), {real()['date']})",
    lambda: f"| 1 Gb/s | {steps_of('1gbit')} |",
    lambda: f"| 10 Gb/s | {steps_of('10gbit')} |",
    lambda: (
        f"`bytegrad()` {copies('bytegrad()')}, with error feedback {copies('bytegrad(error_feedback=True)')}, "
        f"`diloco()` {copies('diloco(2)')}"
    ),
    lambda: f"Python {pythons()}, torch {torches()}.",
]

# What no measurement says: networks and machines for which something is advised, formats, devices, and arguments.
CONDITIONS = r"""\d+-bit | \d\sbits | H[12]00 | FSDP2 | \d+\sMb/s\sor\sless | \d+\sGb/s(,\sGPUs|\sor\sless|\sor\smore)
    | CPUs\sat\s10\sGb/s | 8\sGPUs\swithout\sNVLink | each\slimited\sto\s100\sMb/s | against\sseconds\sat\s100\sMb/s
    | U?[Ii]nt\d+ | bk\.Ranks\(4\) | bf16\shook | eth0 | --node_rank=1 """


def read(path):
    """Return the prose of a page: no blocks of code, no addresses, no code in backticks that is no part of a claim."""
    text = re.sub(r"^```.*?^```", "", (ROOT / path).read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_sentence_of_the_front_page_says_what_was_measured(claim):
    assert claim() in read("README.md")


@pytest.mark.parametrize("path", ["README.md", "docs/index.md"])
def test_the_front_page_has_no_other_numbers(path):
    text = read(path)
    for claim in CLAIMS:
        text = text.replace(claim(), "")
    text = re.sub(r"\]\([^)]*\)|https?://\S+", "", text)
    text = re.sub(CONDITIONS, "", text, flags=re.VERBOSE)
    assert re.findall(r".{0,30}\d.{0,20}", text) == []
