"""Every kernel compiles for every GPU it is meant for, and its code moves memory as it should. No GPU is needed."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")
ROOT = pathlib.Path(__file__).parents[2]
SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


@pytest.fixture(scope="module", params=["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
def compiled(request: pytest.FixtureRequest) -> list[dict]:
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(pathlib.Path(__file__).with_name("ahead_of_time.py")), request.param]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def name_of(facts: dict) -> str:
    return " ".join(str(facts[key]) for key in ("target", "kernel", "dtype", "block", "masked", "residual"))


def test_nothing_spills(compiled):
    for facts in compiled:
        assert not any(facts["spilled"]), name_of(facts)


def test_no_product_is_fused_with_a_sum_and_no_subnormal_is_flushed(compiled):
    for facts in compiled:
        if facts["target"].startswith("cuda"):  # an AMD division is itself made of fused steps
            assert (facts["fused"], facts["flushing"]) == (0, []), name_of(facts)


def test_values_stream_in_sixteen_bytes_and_codes_in_whole_lines(compiled):
    for facts in compiled:
        if facts["masked"]:
            continue
        accesses, values = facts["accesses"], facts["values"]
        cuda = facts["target"].startswith("cuda")
        load, store = ("global_load_dwordx4", "global_store_dwordx4")
        if cuda:
            load, store = (
                f"{access}.global.{'v2.b64' if facts['dtype'] == 'fp64' else 'v4.b32'}" for access in ("ld", "st")
            )
        wide = values * SIZES[facts["dtype"]] // 16
        residual = values * 4 // 16 if facts["residual"] else 0
        if facts["kernel"] == "compress_kernel":
            residual_store = "st.global.v4.b32" if cuda else store
            assert accesses[load] == wide and accesses.get(residual_store, 0) == residual, name_of(facts)
        elif facts["kernel"] == "decompress_kernel":
            assert accesses[store] == wide, name_of(facts)
        elif facts["kernel"] == "add_kernel":
            assert accesses[load] >= wide and accesses[store] == wide, name_of(facts)
        else:
            assert accesses.get(store, 0) == residual + (0 if facts["residual"] else values // 16), name_of(facts)
        # A warp's access to its codes is a line of 128 bytes or more: four bytes a thread, two if a value has eight.
        narrow = [name for name in accesses if name.endswith((".b8", ".u8", "_byte", "_ubyte"))]
        short = [name for name in accesses if name.endswith((".b16", ".u16", "_short", "_ushort"))]
        assert not narrow and (not short or facts["dtype"] == "fp64"), (name_of(facts), accesses)


def test_bytes_moved_are_those_of_the_format(compiled):
    """Each value is read and written once; and each thread moves step and bottom of every block it has values of."""
    for facts in compiled:
        if facts["masked"] or not facts["target"].startswith("cuda"):
            continue
        size, residual = SIZES[facts["dtype"]], 4 * facts["residual"]
        if facts["kernel"] == "compress_kernel":
            expected = {"ld": size, "st": 1 + residual}
        elif facts["kernel"] == "decompress_kernel":
            expected = {"ld": 1, "st": size}
        else:
            continue  # a loop over rows: its body is in the code more than once
        for kind, count in expected.items():
            headers = 8 * max(1, 2048 // facts["block"]) / facts["values"]
            assert count <= facts["moved"][kind] <= count + headers, (name_of(facts), facts["moved"])


def test_streaming_programs_leave_room_for_many(compiled):
    for facts in compiled:
        if facts["target"].startswith("cuda") and not facts["masked"]:
            assert facts["registers"] <= 128, name_of(facts)
