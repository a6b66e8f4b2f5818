"""Every kernel compiles for every GPU it is meant for, and its code moves memory as it should. No GPU is needed."""

import pytest
from tiers import slow_and_compiled
from variants import TARGETS, compiled, name_of

triton = pytest.importorskip("triton")
SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
BODIES = 6  # of a loop over rows, unrolled by four: those, the rest's, and what is stored
# Compiling takes half a minute for each target where nothing is cached.
PARAMS = slow_and_compiled(TARGETS)


def blocks_of(facts: dict) -> int:
    """Return the largest number of blocks of which a thread holds values."""
    return max(1, 2048 // facts["block"])


@pytest.fixture(scope="module", params=PARAMS)
def codec(request: pytest.FixtureRequest) -> tuple[dict, ...]:
    return compiled("codec", request.param)


def spared(codec: tuple[dict, ...]) -> list[dict]:
    """Leave out what Triton 3.9 makes of kernels whose loop over rows is unrolled.

    It takes 239 registers in `add_kernel` and 198 in `reduce_kernel` for float8_e4m3, where Triton 3.7 takes 128 at
    most, and in `add_kernel` 8 to 16 bytes of stack for minmax_uint8 and results in 16 bits.
    """
    newer = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
    return [facts for facts in codec if not (newer and facts["kernel"] in ("add_kernel", "reduce_kernel"))]


def test_nothing_spills(codec):
    for facts in spared(codec):
        assert not any(facts["spilled"]), name_of(facts)


def test_no_product_is_fused_with_a_sum_and_no_subnormal_is_flushed(codec):
    for facts in codec:
        if facts["target"].startswith("cuda"):  # an AMD division is itself made of fused steps
            assert (facts["fused"], facts["flushing"]) == (0, []), name_of(facts)


def test_values_stream_in_sixteen_bytes_and_codes_in_whole_lines(codec):
    for facts in codec:
        if facts["narrow"]:
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
            # Of a rotation, a warp also loads the signs, 128 at a time; and again to restore what it has rounded.
            signs = 2 * max(1, facts["block"] // 128) if facts["format"].endswith("_rotated") else 0
            assert wide <= accesses[load] <= wide + signs, name_of(facts)
            assert accesses.get(residual_store, 0) == residual, name_of(facts)
        elif facts["kernel"] == "decompress_kernel":
            assert accesses[store] == wide, name_of(facts)
        elif facts["kernel"] == "add_kernel":
            assert accesses[load] >= wide and accesses[store] == wide, name_of(facts)
        else:
            assert accesses.get(store, 0) == residual + (0 if facts["residual"] else values // 16), name_of(facts)
        # A warp's access to its codes is a line of 128 bytes or more: four bytes a thread, two if a value has eight or
        # a warp has 64 threads.
        narrow = sum(count for name, count in accesses.items() if name.endswith((".b8", ".u8", "_byte", "_ubyte")))
        short = [name for name in accesses if name.endswith((".b16", ".u16", "_short", "_ushort"))]
        assert narrow <= BODIES * blocks_of(facts) * (facts["header"] == 1), (name_of(facts), accesses)
        assert not short or facts["dtype"] == "fp64" or not cuda, (name_of(facts), accesses)


def test_rows_of_odd_length_move_value_by_value_so_that_a_warp_has_neighbours(codec):
    seen = 0
    for facts in codec:
        if not facts["narrow"] or facts["masked"] or not facts["target"].startswith("cuda"):
            continue
        width, residual = SIZES[facts["dtype"]] * 8, facts["residual"]
        load, store = ("ld", "st") if facts["kernel"] == "compress_kernel" else ("st", "ld")
        expected = {f"{load}.global.b{width}": facts["values"], f"{store}.global.b8": facts["values"]}
        if residual:
            expected["st.global.b32"] = facts["values"]
        assert {name: facts["accesses"][name] for name in expected} == expected, name_of(facts)
        assert not any(".v" in name for name in facts["accesses"]), name_of(facts)
        seen += 1
    assert seen == 4 or not codec[0]["target"].startswith("cuda")


def test_bytes_moved_are_those_of_the_format(codec):
    """Each value is read and written once; and each thread moves the header of every block it has values of."""
    for facts in codec:
        if facts["masked"] or not facts["target"].startswith("cuda"):
            continue
        size, residual, code = SIZES[facts["dtype"]], 4 * facts["residual"], facts["bits"] / 8
        if facts["kernel"] == "compress_kernel":
            expected = {"ld": size, "st": code + residual}
        elif facts["kernel"] == "decompress_kernel":
            expected = {"ld": code, "st": size}
        else:
            continue  # a loop over rows: its body is in the code more than once
        for kind, count in expected.items():
            headers = facts["header"] * blocks_of(facts) / facts["values"]
            assert count <= facts["moved"][kind] <= count + headers, (name_of(facts), facts["moved"])


def test_streaming_programs_leave_room_for_many(codec):
    for facts in spared(codec):
        if facts["target"].startswith("cuda") and not facts["masked"]:
            # Triton 3.6 takes 142 to add up two rows in fp64 on an A100, and 168 to compress rows of odd length, and
            # bf16 in four bits.
            more = facts["dtype"] == "fp64" or facts["narrow"] or (facts["dtype"], facts["bits"]) == ("bf16", 4)
            limit = 168 if more else 128
            assert facts["registers"] <= limit, name_of(facts)
