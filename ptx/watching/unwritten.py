"""Shared memory that is read before anything was written to it."""

from weakref import WeakKeyDictionary

import numpy as np

from ..faults import UnwrittenFault


class Unwritten:
    """Raise an UnwrittenFault where a program reads a byte of its shared memory that it has not written."""

    def __init__(self):
        self.written = WeakKeyDictionary()  # by frame

    def seen(self, access):
        if access.space != "shared":
            return
        frame = access.frame
        if frame not in self.written:
            self.written[frame] = np.zeros(frame.shared.bytes.size, bool)
        written = self.written[frame]
        lanes = frame.lanes(access.on)
        first = frame.program[lanes] * frame.shared.row + access.addresses
        places = first[:, None] + np.arange(access.width)
        if access.kind == "write":
            written[places] = True
            return
        missing = ~written[places].all(axis=1)
        if missing.any():
            at = int(np.broadcast_to(access.addresses, missing.shape)[np.argmax(missing)])
            raise UnwrittenFault(
                f"{access.instruction}: {frame.thread(access.on, missing)} reads shared memory at {at}, "
                "which nothing was written to"
            )

    def ended(self):
        pass
