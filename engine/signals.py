"""Ctrl-C and SIGTERM during training: finish the step, save, and leave; a second one leaves at once.

Not under torchrun: there a cluster and torchrun may both pass on the same request, and torchrun itself ends a process
that takes too long.
"""

import os
import signal
import threading
from types import FrameType

import torch.distributed as dist


class StopSignals:
    """While the block runs, `received` is the signal that asks to stop, or None.

    Outside the main thread of a program signals cannot be caught; the block then runs without.
    """

    HANDLED = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> "StopSignals":
        catchable = self.HANDLED if threading.current_thread() is threading.main_thread() else ()
        self.previous = {number: signal.signal(number, self._handle) for number in catchable}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and not dist.is_torchelastic_launched():
            os._exit(128 + number)
        self.received = number
