"""The page of the model's results: bench/scaling/README.md."""

import os
from pathlib import Path

import bench.scaling

from .published import report

PAGE = Path(__file__).parent / "README.md"

HEAD = """# Scale, on paper

This page is written by `python -m bench.scaling`; do not edit it. Nothing on it was measured by us.

"""

PICTURES = {
    "scaling-vgg16": "VGG16 on 128 GPUs: published by Bagua, and the model",
    "scaling-resnet50": "ResNet-50 on 16 to 128 GPUs: published by BlueFog, and the model",
    "scaling-outlook": "Efficiency up to 1,024 nodes, by the model",
}


def write(results: Path, page: Path = PAGE) -> Path:
    """Write the page around the pictures in the folder of results, and return its path."""
    parts = [HEAD + (bench.scaling.__doc__ or "")]
    for name, words in PICTURES.items():
        parts.append(f"![{words}]({os.path.relpath(results / name, page.parent)}.png)\n")
    parts.append(f"## Published and model, images a second\n\n```\n{report()}\n```\n")
    page.write_text("\n".join(parts))
    return page
