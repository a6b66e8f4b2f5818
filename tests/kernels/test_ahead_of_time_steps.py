"""The kernels of optimizer steps compile for every GPU they are meant for, and their code moves what it should."""

import pytest
from tiers import slow_and_compiled
from variants import TARGETS, compiled, name_of

pytest.importorskip("triton")


@pytest.fixture(scope="module", params=slow_and_compiled(TARGETS))
def steps(request: pytest.FixtureRequest) -> tuple[dict, ...]:
    return compiled("steps", request.param)


def test_nothing_spills_and_nothing_is_fused(steps):
    for facts in steps:
        assert not any(facts["spilled"]), name_of(facts)
        if facts["target"].startswith("cuda"):  # an AMD division is itself made of fused steps
            assert (facts["fused"], facts["flushing"]) == (0, []), name_of(facts)


def wide_bytes(facts, kind: str) -> int:
    """Bytes that a thread moves four values at a time, which only whole tiles do."""
    sizes = {".v4.b32": 16, ".v2.b32": 8} if facts["target"].startswith("cuda") else {"_dwordx4": 16, "_dwordx2": 8}
    prefix = {"ld": ("ld.global", "global_load", "buffer_load"), "st": ("st.global", "global_store", "buffer_store")}
    return sum(
        count * size
        for name, count in facts["accesses"].items()
        for end, size in sizes.items()
        if name.startswith(prefix[kind]) and name.endswith(end)
    )


def test_whole_tiles_move_four_values_a_thread_and_each_byte_once(steps):
    """The table of bytes: 28 for AdamW in fp32, 25 where gradients are packed (their codes are one access of four)."""
    for facts in steps:
        if facts["kernel"] != "step_kernel" or not facts["target"].startswith("cuda"):
            continue
        packed = facts["g"] == "u8"
        codes = 1 if packed else 0
        assert wide_bytes(facts, "ld") == (facts["read"] - codes) * facts["values"], name_of(facts)
        assert wide_bytes(facts, "st") == facts["written"] * facts["values"], name_of(facts)
    adamw = [f for f in steps if f["kernel"] == "step_kernel" and f["rule"] == "AdamW" and f["p"] == "fp32"]
    assert {f["g"]: f["read"] + f["written"] for f in adamw} == {"fp32": 28, "bf16": 26, "u8": 25}


def test_a_norm_reads_four_values_a_thread(steps):
    """A turn of the loop over whole tiles; the loop's body may stand in the code more than once."""
    for facts in steps:
        if facts["kernel"] == "partials_kernel" and facts["target"].startswith("cuda"):
            read = wide_bytes(facts, "ld")
            assert read >= facts["read"] * facts["values"] and read % (4 * facts["read"]) == 0, name_of(facts)


def test_amd_moves_sixteen_bytes_of_fp32_a_thread(steps):
    for facts in steps:
        if facts["kernel"] == "step_kernel" and facts["target"].startswith("hip") and facts["p"] == "fp32":
            stores = sum(n for name, n in facts["accesses"].items() if name.endswith("store_dwordx4"))
            assert stores >= facts["written"] * facts["values"] // 16, name_of(facts)


def test_programs_leave_room_for_more(steps):
    for facts in steps:
        if facts["target"].startswith("cuda") and facts["kernel"] == "step_kernel":
            assert facts["registers"] <= 128, name_of(facts)
