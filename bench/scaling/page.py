"""The page of the planner beyond one machine: bench/scaling/README.md."""

import os
from pathlib import Path

import bench.scaling

from . import check
from .published import report

PAGE = Path(__file__).parent / "README.md"

HEAD = """# Scale, on paper

This page is written by `python -m bench.scaling`; do not edit it. Of the first part nothing was measured by us.

"""

PICTURES = {
    "scaling-vgg16": "VGG16 on 128 GPUs: published by Bagua, and the planner",
    "scaling-resnet50": "ResNet-50 on 16 to 128 GPUs: published by BlueFog, and the planner",
    "scaling-outlook": "Efficiency up to 1,024 nodes, by the planner",
}
CHECK = """## Measured between two hosts, predicted for more

Steps of the task `wide` of [slow networks](../network/README.md), hosts on 500 Mb/s, and their predictions from what
`bk.tune.probe` found between 2 hosts. All hosts of the laboratory share two cores, so their own work takes longer the
more they are: the last column takes only the links of 2 hosts, and the speeds of codecs, copies and threads that as
many hosts found. What is left is mostly that, too: a plain all-reduce, which computes least, is within 6 %.
"""
OTHER = "What a rank of up to 16,384 does, counted, is in [many ranks](many/README.md).\n"


def write(results: Path, page: Path = PAGE) -> Path:
    """Write the page around the pictures in the folder of results, and return its path."""
    parts = [HEAD + (bench.scaling.__doc__ or ""), OTHER]
    for name, words in PICTURES.items():
        parts.append(f"![{words}]({os.path.relpath(results / name, page.parent)}.png)\n")
    parts.append(f"## Published and planner, images a second\n\n```\n{report()}\n```\n")
    parts.append(f"{CHECK}\n```\n{check.report()}\n```\n")
    page.write_text("\n".join(parts))
    return page
