"""Every kernel compiles for every GPU it is meant for, and its code moves memory as it should. No GPU is needed."""

import pytest
from tiers import slow_after, slow_and_compiled
from variants import TARGETS, compiled, name_of, printed_by, without_errors

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


def test_products_are_fused_with_a_sum_only_by_tl_fma_and_no_subnormal_is_flushed(codec):
    for facts in codec:
        if facts["target"].startswith("cuda"):  # an AMD division is itself made of fused steps
            assert facts["unasked"] == 0, name_of(facts)
            assert facts["flushing"] == [], name_of(facts)


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
            codes = 0 if facts["residual"] else values * facts["bits"] // 128  # else a thread's codes are apart
            assert accesses.get(store, 0) == residual + codes, name_of(facts)
        # A warp's access to its codes is a line of 128 bytes or more: four bytes a thread, two if a value has eight or
        # a warp has 64 threads.
        narrow = sum(count for name, count in accesses.items() if name.endswith((".b8", ".u8", "_byte", "_ubyte")))
        short = [name for name in accesses if name.endswith((".b16", ".u16", "_short", "_ushort"))]
        headers = BODIES * blocks_of(facts) * (facts["header"] == 1)
        assert narrow <= headers + blocks_of(facts) * facts["told"], (name_of(facts), accesses)
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
            # bf16 in four bits. Averages of one bit hold 64 values a thread, and load little.
            more = facts["dtype"] == "fp64" or facts["narrow"] or (facts["dtype"], facts["bits"]) == ("bf16", 4)
            more |= facts["kernel"] == "reduce_kernel" and facts["bits"] == 1 and not facts["residual"]
            limit = 168 if more else 128
            assert facts["registers"] <= limit, name_of(facts)


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


pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(900)  # the first test of a target waits until all is compiled
# Compiling takes half a minute for each target where nothing is cached.
VECTORS = ("v4.b32", "v2.b64")
SPILLED = 312  # bytes of a thread: uint1 has the most, on cuda:90


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


def test_nothing_spills_where_weights_mix(mixing):
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
            told = facts.get("told", False)  # a byte
            assert facts["moved"]["ld"] * facts["values"] == 16 * reads + told, (name_of(facts), facts["accesses"])
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


def test_programs_that_mix_leave_room_for_many(mixing):
    for facts in mixing:
        if facts["target"].startswith("cuda") and not facts["masked"]:
            assert facts["registers"] <= 128, (name_of(facts), facts["registers"])


def test_the_k_largest_are_found_in_few_registers_and_read_in_sixteen_bytes(topk):
    for facts in topk:
        if facts["kernel"] != "select_kernel":
            continue
        # AMD's scalars may go to lanes of vector registers; on NVIDIA's GPUs some of the values do not fit.
        most = 200 if facts["k"] < facts["chunk"] // 8 else 600  # of a whole chunk a thread holds 32
        assert sum(facts["spilled"][-2:]) <= most * facts["target"].startswith("cuda"), name_of(facts)
        names = ("ld.global.v4.b32", "ld.global.v2.b64", "global_load_dwordx4", "buffer_load_dwordx4")
        loads = sum(facts["accesses"].get(name, 0) for name in names)
        if facts["chunk"] >= 512:  # a smaller one has fewer than sixteen bytes for a thread
            assert loads >= facts["values"] * SIZES[facts["dtype"]] // 16, (name_of(facts), facts["accesses"])


def test_packing_and_adding_the_k_largest_take_few_registers_and_fuse_nothing(topk):
    from baguakit.kernels.topk_gpu import REGISTERS

    for facts in topk:
        assert facts.get("registers", 0) <= REGISTERS, (name_of(facts), facts["registers"])
        if facts["kernel"] != "select_kernel":
            assert not any(facts["spilled"]), name_of(facts)
            assert not facts.get("fused") and not facts.get("flushing"), name_of(facts)


@pytest.fixture(scope="module", params=slow_after(0, [target for target in TARGETS if target.startswith("cuda")]))
def exchange(request: pytest.FixtureRequest) -> tuple[dict, ...]:
    return without_errors(printed_by("exchange_code.py", request.param))


def test_exchanges_between_ranks_take_no_more_than_they_do(exchange):
    """Tiles of 4,096 values take nearly all registers; in means in two hops some spill."""
    for facts in exchange:
        assert sum(facts["spilled"]) <= SPILLED, name_of(facts)
        assert (facts["unasked"], facts["flushing"]) == (0, []), name_of(facts)


def test_exchanges_between_ranks_move_values_in_sixteen_bytes(exchange):
    """Those of x: loaded and stored at the ends, four at a time, eight times a thread."""
    for facts in exchange:
        for kind in ("ld", "st"):
            wide = sum(facts["accesses"].get(f"{kind}.global.{vector}", 0) for vector in VECTORS)
            assert wide >= facts["values"] * SIZES["fp32"] // 16, (name_of(facts), facts["accesses"])


@pytest.fixture(scope="module", params=slow_after(0, TARGETS))
def changes(request: pytest.FixtureRequest) -> tuple[dict, ...]:
    return compiled("changes", request.param)


def test_values_that_have_changed_are_read_in_sixteen_bytes_and_nothing_spills(changes):
    for facts in changes:
        # With values of eight bytes, `many_kernel` keeps up to four words on its stack.
        most = 32 * ((facts["kernel"], facts["size"]) == ("many_kernel", 8))
        assert sum(facts["spilled"]) <= most, (name_of(facts), facts["spilled"])
        if facts["target"].startswith("cuda") and facts["kernel"] == "few_kernel" and not facts["masked"]:
            loads = sum(facts["accesses"].get(name, 0) for name in ("ld.global.v4.b32", "ld.global.v2.b64"))
            assert loads >= 2 * facts["values"] * facts["size"] // 16, (name_of(facts), facts["accesses"])
