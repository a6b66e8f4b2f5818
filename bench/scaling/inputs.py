"""Numbers that describe a cluster and training on it: assumed ones, and measured ones in their place."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from baguakit.compressors import MinMaxUInt8
from baguakit.tune import Network

from .model import CODEC_BYTES, Cluster, Training

START = Cluster(per_node=1, beta=1.25e9), Training(25_557_032, 64, 64 / 350)


def measured(paths: Sequence[Path]) -> tuple[Cluster, Training]:
    """Inputs of the outlook, later files over earlier ones.

    Each holds what `bk.tune.probe` found, as `Network.to_json` wrote it, or a JSON object of fields of `Cluster` and
    `Training`, which may name any of them.

    Raises:
        ValueError: a file holds something else.
    """
    cluster, training = START
    for path in paths:
        given = json.loads(path.read_text())
        if not isinstance(given, dict):
            raise ValueError(f"{path} holds no JSON object, of a Network or of fields of the model")
        if "links" in given:
            cluster = cluster_of(Network.from_json(path.read_text()), cluster)
            continue
        known = {kind: {f.name for f in fields(kind)} for kind in (Cluster, Training)}
        if unknown := set(given) - known[Cluster] - known[Training]:
            raise ValueError(
                f"{path} names {', '.join(sorted(unknown))}, which the model does not have; "
                f"it has {', '.join(sorted(known[Cluster] | known[Training]))}"
            )
        cluster = replace(cluster, **{k: v for k, v in given.items() if k in known[Cluster]})
        training = replace(training, **{k: v for k, v in given.items() if k in known[Training]})
    return cluster, training


def cluster_of(network: Network, start: Cluster) -> Cluster:
    """A cluster as a probe found it: its links over as many flows as carry most, and its 8-bit codec, if probed.

    A node's interface is shared by its ranks, which a probe lets exchange all at once: β is the sum of theirs.
    """
    g = network.per_node
    part = "inter" if g > 1 else "flat"
    line = max((link.exchange for link in network.links if link.part == part), key=lambda line: line.rate)
    found = replace(start, per_node=g, alpha=line.alpha, beta=g * line.rate)
    if g > 1:
        found = replace(found, beta_intra=network.link("intra").exchange.rate)
    speeds = [each for each in network.codecs if each.name == repr(MinMaxUInt8())]
    for each in speeds:
        found = replace(found, codec=CODEC_BYTES / (each.compress + each.reduce + each.decompress))
    return found
