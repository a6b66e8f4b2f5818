"""Results of `scripts/gpu`: a comparison with predictions, and the report for an issue."""

import json
import socket
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
import gpu_compare  # noqa: E402 there it lies
import gpu_issue  # noqa: E402


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


def test_names_of_a_machine_are_left_out(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.lab.example.org")
    said = (
        "node7 and node7.lab.example.org, not node77: /opt/conda/lib/python3.12/site-packages/torch/a.py, NET/Socket/0"
    )
    plain = gpu_issue.anonymous(said)
    assert plain == "HOST and HOST, not node77: site-packages/torch/a.py, NET/Socket/0"
    assert gpu_issue.anonymous("/tmp, /home/ann and 2.11.0, 1.2.3.4") == "/tmp, ~ and 2.11.0, ADDRESS"
