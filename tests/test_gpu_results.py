"""Results of `scripts/gpu`: a comparison with predictions, counts of Nsight Compute, and the report for an issue."""

import json
import socket
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
import gpu_compare  # noqa: E402 there it lies
import gpu_issue  # noqa: E402
import gpu_sectors  # noqa: E402

from bench import pages  # noqa: E402

MACHINE = {"device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-23"}


def measured(name, values, share):
    return {"family": "Sign()", "name": name, "values": values, "bytes": 5 * values, "seconds": 1e-3, "share": share}


def predicted(name, dtype, share, floor=4):
    named = {"family": "Sign()", "name": name, "dtype": dtype}
    return named | {
        "busy": {"memory": 1.0, "issue": 1 / share},
        "requested": 2.0,
        "distinct": 1.125,
        "bytes": 4,
        "floor": floor,
    }


MEASURED = {
    "machine": MACHINE,
    "copy_gb_per_s": [4290.0, 4310.0],
    "rows": [
        measured("compress", 1 << 20, 0.75),
        measured("compress", 1 << 10, 0.01),
        measured("add 2 rows", 1 << 20, 0.25),
        measured("new", 1 << 20, 1.0),
    ],
}
PREDICTED = {
    "rows": [
        predicted("compress", "fp32", 1.0),
        predicted("compress", "bf16", 0.5),
        predicted("add 2 rows", "fp32", 1.0, floor=2),
        predicted("old", "fp32", 0.5),
    ]
}
COUNTED = {"Sign(), compress": {"sectors": 0.5, "bytes": 5.25}}
PAGE = """\
# Measured and predicted: NVIDIA H200

torch 2.11.0, triton 3.6.0, 2026-11-23. A copy ran at 4290 GB/s before and 4310 GB/s after. Shares are of that speed, \
and predicted for it; sectors and bytes are of one value in fp32.

| operation | values | share | predicted share | of predicted | sectors | predicted sectors | bytes | predicted bytes |
|---|---|---|---|---|---|---|---|---|
| Sign(), add 2 rows | 1,048,576 | 0.25 | 0.50 | 0.50 | – | 0.250 | – | 4.50 |
| Sign(), compress | 1,048,576 | 0.75 | 1.00 | 0.75 | 0.500 | 0.250 | 5.25 | 4.50 |
| Sign(), new | 1,048,576 | 1.00 | – | – | – | – | – | – |
| Sign(), old | – | – | 0.50 | – | – | 0.250 | – | 4.50 |
"""


def test_the_largest_size_stands_beside_the_prediction_in_fp32():
    found = gpu_compare.compared(MEASURED, PREDICTED, COUNTED)
    assert [row["operation"] for row in found["rows"]] == [
        f"Sign(), {x}" for x in ("compress", "add 2 rows", "new", "old")
    ]
    assert found["rows"][0] == {
        "operation": "Sign(), compress",
        "values": 1 << 20,
        "share": 0.75,
        "predicted_share": 1.0,
        "of_predicted": 0.75,
        "sectors": 0.5,
        "predicted_sectors": 0.25,
        "bytes": 5.25,
        "predicted_bytes": 4.5,
    }
    assert found["rows"][2]["predicted_share"] is found["rows"][2]["of_predicted"] is found["rows"][3]["share"] is None
    assert found["counted"] is None and gpu_compare.page(found) == PAGE


@pytest.mark.parametrize(
    "copy, memory, share", [(4300.0, 1.0, 0.5), (2150.0, 1.0, 1.0), (8600.0, 1.0, 0.25), (1.0, 1.25, 0.8)]
)
def test_what_is_predicted_for_one_speed_of_memory_is_told_for_another(copy, memory, share):
    """Half as fast, it leaves instructions twice the time for each byte."""
    assert gpu_compare.share_of({"busy": {"memory": memory, "issue": 2.0, "float": 0.5}}, copy * 1e9) == share


def test_every_measured_operation_is_predicted():
    if not gpu_compare.PREDICTED.exists():
        pytest.skip("needs the file that `python -m bench.roofline --predicted` writes")
    files = gpu_compare.PREDICTED.with_name("roofline-cpu.json"), gpu_compare.PREDICTED
    found = gpu_compare.compared(*(json.loads(path.read_text()) for path in files), "nothing is counted")
    assert not [row["operation"] for row in found["rows"] if row["values"] and row["predicted_share"] is None]


def test_what_was_not_counted_is_said(tmp_path, capsys):
    """The program reads two files, and writes two and its facts."""
    (tmp_path / "roofline-cpu.json").write_text(json.dumps(MEASURED))
    (tmp_path / "predicted.json").write_text(json.dumps(PREDICTED))
    words = [
        str(tmp_path),
        "--cpu",
        "--predicted",
        str(tmp_path / "predicted.json"),
        "--facts",
        str(tmp_path / "facts"),
    ]
    assert gpu_compare.main(words) == 0
    found = gpu_compare.compared(MEASURED, PREDICTED, "this is a CPU")
    assert (
        found == json.loads((tmp_path / "comparison.json").read_text()) == json.loads((tmp_path / "facts").read_text())
    )
    page = (tmp_path / "comparison.md").read_text()
    assert "Sectors and bytes were not counted: this is a CPU.\n" in page and page in capsys.readouterr().out


@pytest.mark.parametrize("there, source", [([], "the part `roofline`"), (["roofline-gpu.json"], "--predicted`")])
def test_a_missing_file_is_named_with_what_writes_it(tmp_path, capsys, there, source):
    for name in there:
        (tmp_path / name).write_text(json.dumps(MEASURED))
    words = [str(tmp_path), "--predicted", str(tmp_path / "predicted.json"), "--facts", str(tmp_path / "facts")]
    assert gpu_compare.main(words) == 0
    said = capsys.readouterr().out
    assert json.loads((tmp_path / "facts").read_text()) == {"not compared": said.rstrip("\n")}
    assert source in said and said.endswith("is missing\n") and not (tmp_path / "comparison.json").exists()


# Nsight Compute.

METRICS = (*gpu_sectors.SECTORS, *gpu_sectors.BYTES)
NCU = """#!{python}
import json, pathlib, sys
pathlib.Path(sys.argv[-1]).write_text(json.dumps(["Sign(), compress", "mixing, land"]))
print("==PROF== Connected to process 7")
def row(*cells): print(",".join(f'"{{cell}}"' for cell in cells))
row("ID", "Host Name", "Kernel Name", *{metrics})
row("", "", "", "sector", "sector", "byte", "byte")
row(0, "host", "memset", 9, 9, 9, 9)
row(1, "host", "spin_kernel(long)", 9, 9, 9, 9)
row(2, "host", "sign_kernel", "1,048,576", 0, "4,194,304", "0")
row(3, "host", "sign_kernel", 0, 524288, 0, 1048576)
row(4, "host", "spin_kernel(long)", 9, 9, 9, 9)
row(5, "host", "land_kernel", 262144, 262144, 0, 2097152)
"""


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Put a program in the place of ncu."""

    def put(code):
        (tmp_path / "ncu").write_text(code.format(python=sys.executable, metrics=METRICS))
        (tmp_path / "ncu").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return put


def test_sectors_and_bytes_of_an_operation_are_those_of_the_kernels_after_its_mark(ncu):
    ncu(NCU)
    assert gpu_sectors.counted() == {
        "Sign(), compress": {"sectors": 1.5, "bytes": 5.0},
        "mixing, land": {"sectors": 0.5, "bytes": 2.0},
    }


def test_why_nothing_is_counted(ncu, tmp_path, monkeypatch):
    ncu("#!{python}\nprint('==ERROR== ERR_NVGPUCTRPERM: no permission to read counters')\nraise SystemExit(1)\n")
    assert gpu_sectors.counted() == "ncu ended with 1, ==ERROR== ERR_NVGPUCTRPERM: no permission to read counters"
    ncu("#!{python}\nimport time\ntime.sleep(600)\n")
    monkeypatch.setattr(gpu_sectors, "SECONDS", 0.1)
    assert gpu_sectors.counted() == "ncu did not end within 0.1 s"
    monkeypatch.setattr(gpu_sectors, "SECONDS", 60)
    ncu(NCU.replace('"Kernel Name"', '"Function"'))
    assert gpu_sectors.counted() == "the table of ncu was not understood, KeyError: 'Kernel Name'"
    (tmp_path / "ncu").unlink()
    assert gpu_sectors.counted() == "Nsight Compute (ncu) is not on the PATH"
    with pytest.raises(ValueError, match="2 operations were run, and ncu saw 0"):
        gpu_sectors.sums([], ["a", "b"])


# The report.

RESULTS = {
    "machine": {
        "dry": False,
        "gpu": ["NVIDIA H200", "NVIDIA H200"],
        "driver": "580.65.06",
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "nccl": "2.28.9",
        "triton": "3.6.0",
        "python": "3.12.3",
        "system": "Linux-6.8.0-x86_64-with-glibc2.39",
        "date": "2026-11-23",
        "missing": ["sklearn"],
        "skipped": {},
    },
    "parts": {
        "compile": {
            "status": "passed",
            "seconds": 31.24,
            "found": {"target": "cuda:90", "compiled": [{}, {}], "failed": {}},
            "said last": [],
        },
        "kernels": {
            "status": "failed with 1",
            "seconds": 80.0,
            "found": {
                "passed": 7,
                "skipped": 2,
                "reasons": {"needs lmdb": 2},
                "failed": {"tests/kernels/test_a.py::test_b[1/2]": "RuntimeError: in /home/ann/work/net.py\nmore"},
                "cut off": ["tests/kernels/test_a.py::test_c"],
            },
            "said last": [f'  File "{ROOT}/tests/a.py", line 7', "see https://example.org/a/b/c", "10.1.2.3 refused"],
        },
        "peer": {"status": "passed", "seconds": 99.0, "found": {"named": True, "seconds": 2.08491}, "said last": []},
        "comparison": {"status": "passed", "seconds": 1.0, "found": {"rows": []}, "said last": []},
    },
}
REPORT = f"""\
baguakit: report of scripts/gpu

GPU      NVIDIA H200, NVIDIA H200
driver   580.65.06
CUDA     13.0
NCCL     2.28.9
torch    2.11.0+cu130
triton   3.6.0
Python   3.12.3
system   Linux-6.8.0-x86_64-with-glibc2.39
date     2026-11-23
without  sklearn

Parts
  compile     passed, 31.2 s
    target: cuda:90
    compiled: 2
  kernels     failed with 1, 80.0 s
    |   File "tests/a.py", line 7
    | see https://example.org/a/b/c
    | ADDRESS refused
    passed: 7
    skipped: 2
    skipped 2: needs lmdb
    failed: tests/kernels/test_a.py::test_b[1/2]: RuntimeError: in …/net.py
    cut off: tests/kernels/test_a.py::test_c
  pair        not run
  waits       not run
  streams     not run
  uncached    not run
  groups      not run
  backend     not run
  peer        passed, 99.0 s
    named: True
    seconds: 2.085
  silent      not run
  mesh        not run
  real        not run
  roofline    not run
  comparison  passed, 1.0 s
  profile     not run
  overlap     not run
  plugin      not run
  users       not run
  benchmarks  not run
  rest        not run

{PAGE}"""


def test_the_page_of_benchmarks_takes_the_results_of_a_run_as_they_are():
    table = [f"| {name} | yes |" for name in ("a | 1.000 ms | fast", "b | 2.000 ms | –")]
    rows = [dict(zip(("name", "median", "beside", "verified"), line[2:-2].split(" | "), strict=True)) for line in table]
    benchmarks = {"status": "passed", "seconds": 9.0, "found": {"benchmarks": rows}}
    assert "| kernels | failed with 1 | 80 | passed 7, skipped 2 |" in pages.ran(RESULTS)
    assert set(table) <= {*pages.ran(RESULTS | {"parts": RESULTS["parts"] | {"benchmarks": benchmarks}})}


def test_the_report_of_a_run_tells_all_and_names_no_path_address_or_host(tmp_path):
    (tmp_path / "comparison.md").write_text(PAGE)
    assert gpu_issue.text(RESULTS, tmp_path) == REPORT


def test_names_of_a_machine_are_left_out(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.lab.example.org")
    said = (
        "node7 and node7.lab.example.org, not node77: /opt/conda/lib/python3.12/site-packages/torch/a.py, NET/Socket/0"
    )
    plain = gpu_issue.anonymous(said)
    assert plain == "HOST and HOST, not node77: site-packages/torch/a.py, NET/Socket/0"
    assert gpu_issue.anonymous("/tmp, /home/ann and 2.11.0, 1.2.3.4") == "/tmp, ~ and 2.11.0, ADDRESS"
