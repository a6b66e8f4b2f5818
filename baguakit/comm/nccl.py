"""NCCL groups whose errors the monitor of an attachment tells, so that torch's watchdog need not end the process."""

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# The constructor of ProcessGroupNCCL reads these, and its options have no fields for them.
#
# Mode 0: upon an error the watchdog notes it, and no more. Modes 1 and 3 end the process. Mode 2 aborts, which lets
# kernels end that have not brought their data, before anybody has said so. Here the monitor reads what was noted, names
# the rank at fault, fails its flights, and aborts.
#
# An error still tells the first NCCL group of the process, which is the user's, to write its flight record; that one
# ends the process TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (480 s) later, unless it has been destroyed by then.
SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # it makes mode 0 a 3
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # it lets the host wait in each flight
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # four times as long the watchdog sleeps, and whoever joins it waits
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # a watchdog that stands still ends the process
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # a failed kernel is raised where Python next asks CUDA for something
}

_lock = threading.Lock()  # the environment is the whole process's
_c10d: Any = dist  # type checkers are not told of all its names


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Let NCCL groups that are made in this block note errors, and neither end the process nor abort by themselves."""
    with _lock:
        before, level = {name: os.environ.get(name) for name in SETTINGS}, _c10d.get_debug_level()
        os.environ.update(SETTINGS)
        if level == _c10d.DebugLevel.DETAIL:  # it turns desync debugging on
            _c10d.set_debug_level(_c10d.DebugLevel.INFO)
        try:
            yield
        finally:
            _c10d.set_debug_level(level)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def nccl_backend(store: Any, rank: int, members: list[int], name: str, timeout: timedelta) -> Any:
    """Return a new NCCL backend that leaves errors to its maker.

    Args:
        store: a part of the key-value store that no other group uses.
        rank: this process's in the group.
        members: the ranks of all members in the default group, in order.
        name: in torch's logs and its flight recorder.
        timeout: of each message.
    """
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name, options.global_ranks_in_group = name, members
    with unwatched():
        return _c10d.ProcessGroupNCCL(store, rank, len(members), options)


def error_in(groups: Iterable[Any]) -> str:
    """Return the first error that the watchdogs of groups have noted, such as "COMM_ERROR"; "" for none."""
    backends = [
        group._get_backend(device) for group in groups for device in group._device_types if device.type == "cuda"
    ]
    errors = [str(backend.get_error().name) for backend in backends if hasattr(backend, "get_error")]
    return next((error for error in errors if error != "SUCCESS"), "")
