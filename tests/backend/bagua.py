"""Groups of the backend on the live ranks, and the calls that fly in them."""

import contextlib
from datetime import timedelta

import torch.distributed as dist

import baguakit as bk


@contextlib.contextmanager
def group(policy=None, members=None, timeout=60):
    """A group of the backend over all ranks, or some."""
    bk.backend.register(policy)
    made = dist.new_group(members, backend="bagua", timeout=timedelta(seconds=timeout))
    try:
        yield made
    finally:
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(made)


def rows():
    """The calls so far, by operation, format and reason."""
    return {(row.operation, row.format, row.reason): row.calls for row in bk.backend.report().rows}


def flown(work):
    """Do some work, and return its result and {(operation, format, reason): calls} of what flew meanwhile."""
    before = rows()
    result = work()
    after = rows()
    return result, {key: calls - before.get(key, 0) for key, calls in after.items() if calls > before.get(key, 0)}


def said(work):
    """Return the error that some work raises, as text; "" if it raises none."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
