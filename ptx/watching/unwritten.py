"""Shared memory that is read before anything was written to it."""

import numpy as np

from ..faults import UnwrittenFault


class Unwritten:
    """Raise an UnwrittenFault where a program reads a byte of its shared memory that it has not written."""

    def __init__(self):
        self.frame, self.written = None, None

    def seen(self, access):
        if access.space != "shared":
            return
        frame = access.frame
        if frame is not self.frame:
            self.frame, self.written = frame, np.zeros(frame.shared.bytes.size, bool)
        lanes = frame.lanes(access.on)
        first = frame.program[lanes] * frame.shared.row + access.addresses
        places = first[:, None] + np.arange(access.width)
        if access.kind == "write":
            self.written[places] = True
            return
        missing = ~self.written[places].all(axis=1)
        if missing.any():
            at = int(np.broadcast_to(access.addresses, missing.shape)[np.argmax(missing)])
            raise UnwrittenFault(
                f"{access.instruction}: {frame.thread(access.on, missing)} reads shared memory at {at}, "
                "which nothing was written to"
            )

    def ended(self):
        pass
