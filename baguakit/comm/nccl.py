"""NCCL groups whose errors the attachment's monitor reports, in place of torch's watchdog, which ends the process."""

import os
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# The constructor of ProcessGroupNCCL reads these variables; its options have no fields for them.
#
# In mode 0 the watchdog only records errors. Modes 1 and 3 end the process. Mode 2 aborts, which ends kernels that have
# not received their data before the error is reported. Here the monitor reads the recorded error, names the failed
# rank, fails its flights, and aborts.
#
# An error still makes the first NCCL group of the process, which is the user's, write its flight record; that group
# ends the process TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (480 s) later, unless it has been destroyed by then.
SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # it changes mode 0 to mode 3
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # it makes the host wait for each message
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # the watchdog sleeps for four times as long, and joining it waits
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # it ends the process if the watchdog is blocked
    "TORCH_NCCL_NAN_CHECK": "0",  # it ends the process at a NaN, which is sent on purpose: all ranks skip that step
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the next CUDA call of Python raises the error of a failed kernel
}

_lock = threading.Lock()  # the environment belongs to the whole process
_c10d: Any = dist  # its type stubs lack some names


def nccl_backend(store: Any, rank: int, members: list[int], name: str, timeout: timedelta) -> Any:
    """Return a new NCCL backend that only records errors; its arguments are as in `group_over`."""
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name, options.global_ranks_in_group = name, members
    with _lock:
        before, level = {key: os.environ.get(key) for key in SETTINGS}, _c10d.get_debug_level()
        os.environ.update(SETTINGS)
        if level == _c10d.DebugLevel.DETAIL:  # it turns desync debugging on
            _c10d.set_debug_level(_c10d.DebugLevel.INFO)
        try:
            return _c10d.ProcessGroupNCCL(store, rank, len(members), options)
        finally:
            _c10d.set_debug_level(level)
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value


def error_in(groups: Iterable[Any]) -> str:
    """Return the first error that the watchdogs of groups have recorded, such as "COMM_ERROR"; "" for none."""
    backends = [
        group._get_backend(device) for group in groups for device in group._device_types if device.type == "cuda"
    ]
    errors = [str(backend.get_error().name) for backend in backends if hasattr(backend, "get_error")]
    return next((error for error in errors if error != "SUCCESS"), "")
