"""Predict some operations, and show what their machine code keeps busy.

python -m bench.predicted "UInt4(): average 8 rows, fp32" "top-k"     rows whose names contain one of the texts
"""

import argparse
import functools
from typing import Any

from .model import GPUS, assembled_of, predict
from .table import ARCH
from .work import operations

SHOWN = 24  # opcodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="texts in `family: name, dtype`")
    parser.add_argument("--values", type=int, default=1 << 16, help="how many values to execute")
    asked = parser.parse_args()
    from ptx.driver import executed
    from ptx.watching.counters import Counters

    counted: list[Any] = []
    with executed(ARCH, watchers=(functools.partial(Counters, counted),)):
        for operation in operations():
            name = f"{operation.family}: {operation.name}, {operation.dtype}"
            if any(each in name for each in asked.rows):
                task = operation.ready(asked.values)
                counted.clear()
                task.by_kernels()
                show(name, counted, predict(counted, asked.values, task.floor, task.moves or task.floor))


def show(name: str, counted: list[Any], row: dict[str, Any]) -> None:
    print(f"{name}\n  instructions a value: {sum(row['pipes'].values()):.1f}, {_named(row['pipes'])}")
    for gpu in GPUS:
        found = row[gpu.name]
        print(f"  {gpu.name}: {found['share']:.2f} of a copy, bound by {found['bound']}; busy: {_named(found['busy'])}")
    for each in counted:
        launch = assembled_of(each)
        print(
            f"  {each.kernel}: {launch.code.registers} registers, {launch.held} programs of {launch.warps} warps a "
            f"multiprocessor, {len(launch.steps)} instructions a warp: {_named(launch.opcodes().most_common(SHOWN))}"
        )


def _named(counts: Any) -> str:
    return ", ".join(f"{name} {count:g}" for name, count in dict(counts).items())


if __name__ == "__main__":
    main()
