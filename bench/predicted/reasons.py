"""Why some kernels are predicted to stay below the target."""

from typing import Any

TARGET = 0.9
DRAWS = "draws: two rounds of an integer hash for each value, fixed by the format's definition"
ROTATES = "rotates blocks: an addition for each value and doubling of the block, and exchanges through shared memory"
SPREADS = "seven instructions to add up eight codes, three to five to scale, round and join, four to eight for headers"
# By beginnings of "family: name, dtype".
REASONS = {
    "Float8(): compress, residual, stochastic": DRAWS,
    "Float8(): compress, fp32": "fifteen integer instructions a value, which come after a program's loads",
    "Float8(): compress, bf16": "three bytes a value: rounding by integers takes fifteen instructions",
    "Float8(): average 8 rows": "nine conversions by integers for each value of nine bytes",
    "MinMaxUInt8(): compress, residual, stochastic": DRAWS,
    "Sign(): compress, bf16": "two bytes a value: adding up magnitudes as integers, and joining eight signs in a byte",
    "Sign(): average 8 rows": SPREADS,
    "UInt4(): compress, residual, stochastic": DRAWS,
    "UInt4(): compress, bf16": "two and a half bytes a value: range, rounding, and joining two codes across threads",
    "UInt2(): average 8 rows": SPREADS,
    "UInt2()": ROTATES,
    "Uniform()": ROTATES,
    "top-k: keep 1%, bf16": "two bytes a value: a maximum of each group, five counts of these, and their ranks",
}


def reason_of(row: dict[str, Any]) -> str | None:
    """Return the reason of a row below the target, or None if it reaches it.

    Raises:
        LookupError: it does not reach it, and no reason is written here.
    """
    if row["H200"]["share"] >= TARGET:
        return None
    named = f"{row['family']}: {row['name']}, {row['dtype']}"
    for beginning, reason in REASONS.items():
        if named.startswith(beginning):
            return reason
    raise LookupError(
        f"{named} is predicted at {row['H200']['share']:.2f} of a copy on an H200; make it faster, or say why not in "
        "bench/predicted/reasons.py"
    )
