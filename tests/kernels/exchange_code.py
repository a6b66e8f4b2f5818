"""Compile kernels of exchanges between ranks for a target, and print facts of their code: a line of JSON for each.

    python exchange_code.py TARGET [FORMAT…]

A line is as those of `ahead_of_time.py`; the arguments are those that the launcher passes.
"""

import json
import sys

import torch
import triton
from ahead_of_time import TARGETS, cuda_facts
from launches import ROWS, Asked, in_rows, joint, wires
from variants import why

VALUES = 4096  # of a tile
LENGTH = 3 * 4 * VALUES  # three shards of whole tiles, accessed in sixteen bytes


def facts_of(asked, options, source, described):
    try:
        binary = triton.compile(source, target=asked.target, options=vars(options))
    except Exception as error:  # Triton raises many kinds, its own and those of the tools that it runs
        return described | {"error": why(error)}
    values = VALUES // (binary.metadata.num_warps * asked.target.warp_size)
    return described | {"values": values} | cuda_facts(binary, values)


if __name__ == "__main__":
    name, *only = sys.argv[1:]
    asked, failed = Asked(TARGETS[name]), False
    for form, wire in [each for each in wires() if not only or each[0] in only]:
        for one_hop in (False, True):
            asked.within = {"format": form, "one_hop": one_hop}
            joint(wire, torch.float32, one_hop, LENGTH)
        for kind in ROWS:
            asked.within = {"format": form, "kind": kind}
            in_rows(kind, wire, torch.float32, LENGTH // 3)
    for described, options, source in asked.seen.values():
        facts = facts_of(asked, options, source, {"target": name, "kernel": source.name} | described)
        failed = failed or "error" in facts
        print(json.dumps(facts), flush=True)
    sys.exit(failed)
