"""Results of `scripts/gpu`: a comparison with predictions, and the report for an issue."""

import json
import socket
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
import gpu_compare  # noqa: E402 there it lies
import gpu_exchange  # noqa: E402
import gpu_issue  # noqa: E402


def test_a_device_is_compared_with_the_predictions_for_it_or_for_the_gpu_with_the_nearest_copy():
    assert gpu_compare.like("NVIDIA H200", 1e12).name == "H200"
    assert gpu_compare.like("NVIDIA H100 80GB HBM3", 9e12).name == "H100"
    assert [gpu_compare.like("CPU", copy).name for copy in (1e10, 9e12)] == ["H100", "H200"]


def test_every_measured_operation_is_predicted():
    if not gpu_compare.PREDICTED.exists():
        pytest.skip("needs the file that `python -m bench.roofline --predicted` writes")
    files = gpu_compare.PREDICTED.with_name("roofline-cpu.json"), gpu_compare.PREDICTED
    found = gpu_compare.compared(*(json.loads(path.read_text()) for path in files), "nothing is counted")
    assert not [row["operation"] for row in found["rows"] if row["values"] and row["predicted_share"] is None]


def test_what_is_wrong_with_means_in_one_kernel_is_named():
    found = {
        "2 processes": {"exact": True, "UInt4()": False},
        "virtual ranks": [{"right": True, "µs": 0.0}, {"right": False}],
    }
    assert gpu_exchange.wrong(found | {"wrong": ["before"]}) == ["2 processes, UInt4()", "virtual ranks, 1, right"]


def test_names_of_a_machine_are_left_out(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.lab.example.org")
    said = (
        "node7 and node7.lab.example.org, not node77: /opt/conda/lib/python3.12/site-packages/torch/a.py, NET/Socket/0"
    )
    plain = gpu_issue.anonymous(said)
    assert plain == "HOST and HOST, not node77: site-packages/torch/a.py, NET/Socket/0"
    assert gpu_issue.anonymous("/tmp, /home/ann and 2.11.0, 1.2.3.4") == "/tmp, ~ and 2.11.0, ADDRESS"
