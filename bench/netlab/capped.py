"""Flows with caps of their own, as no two ways through a real network are alike."""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

import baguakit as bk
from baguakit.comm.groups import own_group
from baguakit.comm.own import Flows
from baguakit.compare.pacing import at, cap, connections

CPU = torch.device("cpu")


def with_caps(comm: bk.Comm, caps: Sequence[float], timeout: timedelta) -> bk.Comm:
    """The same ranks with as many flows as there are caps, each kept below its own, in bytes a second. Collective."""
    store, groups, others, name = comm.group.get_group_store(), [], set(connections()), new_name()
    for flow, rate in enumerate(caps):
        groups.append(own_group(comm.group, store, f"{name}/{flow}", timeout, CPU))
        sent = torch.zeros(comm.size)
        dist.all_to_all_single(torch.empty_like(sent), sent, group=groups[-1])  # two ranks connect with a first message
        new = connections()
        for inode in new.keys() - others:
            with at(new[inode]) as one:
                cap(one, rate)
        others |= new.keys()
    return replace(comm, group=groups[0], flows=len(caps), _flows={"flat": Flows(groups)})


def new_name() -> str:
    """A name that no group has had. Collective."""
    return str(bk.Comm().gather_objects(uuid.uuid4().hex)[0])
