"""How things are timed: warmed up, synchronised, in turn, medians with their spread.

Knows nothing of what it times.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs of one thing."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The figure to quote."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The shortest and the longest."""
        return min(self.seconds), max(self.seconds)

    def __str__(self) -> str:
        """In milliseconds, with the spread."""
        low, high = self.spread
        return f"{1000 * self.median:.2f} ({1000 * low:.2f} to {1000 * high:.2f})"


def time_in_turn(
    alternatives: Mapping[str, Callable[[], object]], *, rounds: int = 7, at_least_seconds: float = 0.1
) -> dict[str, Timing]:
    """Time alternatives A B A B ..., so that a drift of the machine's speed touches all alike.

    Args:
        alternatives: what to run, by name; each is run twice first and not counted.
        rounds: timings of each.
        at_least_seconds: each timing repeats a short run until this has passed.

    Returns:
        Seconds for one run, by name.
    """
    repeats = {}
    for name, run in alternatives.items():
        run()
        once = seconds_of(run, 1)
        repeats[name] = max(1, round(at_least_seconds / max(1e-6, once)))
    timings: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(rounds):
        for name, run in alternatives.items():
            timings[name].append(seconds_of(run, repeats[name]) / repeats[name])
    return {name: Timing(tuple(seconds)) for name, seconds in timings.items()}


def seconds_of(run: Callable[[], object], repeats: int) -> float:
    """How long so many runs take, and what they gave the GPU."""
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    """Wait until the GPU, if there is one, has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()


def machine() -> str:
    """What the figures were measured on, in a line."""
    if torch.cuda.is_available():
        processor = torch.cuda.get_device_name()
    else:
        model = torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine()
        processor = f"{os.cpu_count()} cores of {model}, {torch.get_num_threads()} threads"
    return f"{processor}; {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
