"""Mixing, landing and the k largest compile for every GPU they are meant for, and move memory as they should."""

import pytest
from tiers import slow_after, slow_and_compiled
from variants import TARGETS, compiled, name_of

pytest.importorskip("triton")
from baguakit.kernels.topk_gpu import REGISTERS

pytestmark = pytest.mark.timeout(900)  # the first test of a target waits until all is compiled
# Compiling takes half a minute for each target where nothing is cached.
PARAMS = slow_and_compiled(TARGETS)
VECTORS = ("v4.b32", "v2.b64")
SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


@pytest.fixture(scope="module", params=PARAMS)
def mixing(request: pytest.FixtureRequest) -> tuple[dict, ...]:
    return compiled("mixing", request.param)


@pytest.fixture(scope="module", params=slow_after(0, TARGETS))
def topk(request: pytest.FixtureRequest) -> tuple[dict, ...]:
    return compiled("topk", request.param)


def moved(facts: dict) -> tuple[int, int]:
    """Bytes that the equation reads and writes for a value."""
    if facts["kernel"] == "land_kernel":
        return 3 * SIZES[facts["dtype"]], SIZES[facts["dtype"]]
    return SIZES[facts["begun"]] + facts["count"] * SIZES[facts["dtype"]], SIZES[facts["out"]]


def test_nothing_spills(mixing):
    for facts in mixing:
        assert not any(facts["spilled"]), name_of(facts)


def test_memory_moves_sixteen_bytes_at_a_time_and_no_more_than_the_equation(mixing):
    for facts in mixing:
        if facts["masked"]:
            continue
        reads, writes = (facts["values"] * count // 16 for count in moved(facts))
        if facts["target"].startswith("cuda"):
            wide = [sum(facts["accesses"].get(f"{kind}.global.{v}", 0) for v in VECTORS) for kind in ("ld", "st")]
            assert wide == [reads, writes], (name_of(facts), facts["accesses"])
            weights = 8 * (facts["count"] + 1) if facts["kernel"] == "mix_kernel" and facts["dtype"] == "fp64" else 0
            assert facts["moved"]["ld"] * facts["values"] == 16 * reads + weights, (name_of(facts), facts["accesses"])
            assert facts["moved"]["st"] * facts["values"] == 16 * writes, name_of(facts)
        else:
            assert facts["accesses"]["global_load_dwordx4"] == reads, (name_of(facts), facts["accesses"])
            assert facts["accesses"]["global_store_dwordx4"] == writes, (name_of(facts), facts["accesses"])


def test_a_product_and_its_sum_are_one_instruction_and_nothing_else_is_fused(mixing):
    for facts in mixing:
        if facts["target"].startswith("cuda") and facts["dtype"] in ("fp32", "fp64"):  # cuda:80 converts halves so, too
            count = facts.get("count", 0) * facts["values"]
            assert facts["fused"] in (count, count // 2), name_of(facts)  # cuda:100 fuses two products at once


def test_no_subnormal_is_flushed(mixing):
    for facts in mixing:
        assert not facts.get("flushing"), name_of(facts)


def test_streaming_programs_leave_room_for_many(mixing):
    for facts in mixing:
        if facts["target"].startswith("cuda") and not facts["masked"]:
            assert facts["registers"] <= 128, (name_of(facts), facts["registers"])


def test_the_k_largest_are_found_in_few_registers_and_read_in_sixteen_bytes(topk):
    for facts in topk:
        # AMD's scalars may go to lanes of vector registers; on NVIDIA's GPUs some of the values do not fit.
        assert sum(facts["spilled"][-2:]) <= 160 * facts["target"].startswith("cuda"), name_of(facts)
        names = ("ld.global.v4.b32", "ld.global.v2.b64", "global_load_dwordx4", "buffer_load_dwordx4")
        loads = sum(facts["accesses"].get(name, 0) for name in names)
        if facts["chunk"] >= 512:  # a smaller one has fewer than sixteen bytes for a thread
            assert loads >= facts["values"] * SIZES[facts["dtype"]] // 16, (name_of(facts), facts["accesses"])
        assert facts.get("registers", 0) <= REGISTERS, (name_of(facts), facts["registers"])
