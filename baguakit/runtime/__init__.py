"""The runtime that attachments and handles share: it makes and closes the monitor, process groups and lanes."""

from .agreement import (
    AnySetup,
    Setup,
    agree,
    as_time,
    broadcast_into,
    broadcast_tensors,
    channel_of,
    check_scaler,
    first_said,
    fsdp_modules,
    named,
    plain_names,
    reshard,
)
from .runtime import Channel, Runtime, or_abandon, own_comm, start_monitor, warm_up, warn_of_shared_cards

__all__ = [
    "AnySetup", "Channel", "Runtime", "Setup", "agree", "as_time", "broadcast_into", "broadcast_tensors",
    "channel_of", "check_scaler", "first_said", "fsdp_modules", "named", "or_abandon", "own_comm", "plain_names",
    "reshard", "start_monitor", "warm_up", "warn_of_shared_cards",
]  # fmt: skip
