"""Cases timed in processes of their own, in turn: neither the memory nor the settings of one reach another's.

python -m bench.processes CASE serves one: it warms up, says "ready", answers every line with the seconds of a run, and
ends with the most memory it ever had, in megabytes.
"""

import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.timing import Timing, synchronize

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Measured:
    """What came of one case.

    Attributes:
        timing: of its runs.
        peak_megabytes: resident memory of its process, or what the GPU's allocator held.
    """

    timing: Timing
    peak_megabytes: float


def time_cases_in_turn(names: Iterable[str], *, rounds: int = 5) -> dict[str, Measured]:
    """Time cases of `bench.cases` A B A B ..., each in its own process, only one of them busy at a time."""
    served = {name: _Served(name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in served}
    for _ in range(rounds):
        for name, process in served.items():
            seconds[name].append(process.answer("run"))
    return {name: Measured(Timing(tuple(seconds[name])), served[name].answer("end")) for name in served}


class _Served:
    def __init__(self, name: str) -> None:
        command = [sys.executable, "-m", "bench.processes", name]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.name = name
        self._read()  # "ready", as warming up must not overlap with another case

    def answer(self, line: str) -> float:
        """The number that a line is answered with."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the case {self.name!r} failed; run it alone: python -m bench.processes {self.name!r}")
        return line


def _peak_megabytes() -> float:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's figure begins with that of the process that started this one
        return int(status.read_text(encoding="ascii").split("VmHWM:")[1].split()[0]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def _serve(name: str) -> None:
    from bench.cases import CASES

    run = CASES[name]()
    for _ in range(3):
        run()
    started = time.perf_counter()
    run()
    repeats = max(1, round(0.5 / max(1e-6, time.perf_counter() - started)))
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize()
        print((time.perf_counter() - started) / repeats, flush=True)
    print(_peak_megabytes(), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
