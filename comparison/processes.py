"""Cases measured in processes of their own, in turn: neither the memory nor the settings of one reach another's.

python -m comparison.processes MODULE:FUNCTION ARGUMENTS serves one: it makes the case by calling the function with the
arguments (JSON), warms up, and answers each line on standard input, the name of a run, with the seconds that it took;
to an empty line it answers with the memory that it had. All answers are JSON; a case that runs out of memory says so.
"""

import contextlib
import importlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison.timing import Timing, seconds_of
from config.errors import is_out_of_memory
from engine.device import resident_memory

ROOT = Path(__file__).parent.parent
OUT_OF_MEMORY = "out of memory"
AT_LEAST_SECONDS = 0.25  # a run that is shorter is repeated until so much time has passed


@dataclass(frozen=True)
class Case:
    """What a process measures.

    Attributes:
        runs: what to time, by name; the last one needs the most memory.
        device_type: whose memory it is.
        facts: asked at the end, what else is to be known.
    """

    runs: Mapping[str, Callable[[], object]]
    device_type: str = "cpu"
    facts: Callable[[], Mapping[str, str]] = dict


@dataclass(frozen=True)
class CaseCall:
    """How to make a case: a function, as MODULE:FUNCTION, and its arguments, in plain types."""

    function: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """What came of a case.

    Attributes:
        timings: of its runs, by name; none when it failed.
        peak_megabytes: the most memory that its process had, or that the GPU's allocator gave out; None where the
            system does not tell.
        own_megabytes: as much of it as the runs took, without the program itself.
        facts: that the case gave.
        failed: why there are no timings.
    """

    timings: Mapping[str, Timing]
    peak_megabytes: float | None = None
    own_megabytes: float | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    failed: str = ""

    @property
    def timing(self) -> Timing:
        """Of the last run, or of the only one."""
        return list(self.timings.values())[-1]


def measure_in_turn(calls: Mapping[str, CaseCall], *, rounds: int = 5) -> dict[str, Measured]:
    """Time cases A B A B ..., each in its own process, only one of them busy at a time.

    One that runs out of memory is measured as failed; the others go on.

    Raises:
        RuntimeError: a case failed for another reason.
    """
    with contextlib.ExitStack() as stack:
        served = {name: stack.enter_context(_Served(name, call)) for name, call in calls.items()}
        for process in served.values():
            process.begin()  # one after another, as warming up must not overlap
        for _ in range(rounds):
            for process in served.values():
                process.run_each()
        return {name: process.end() for name, process in served.items()}


class _Served:
    def __init__(self, name: str, call: CaseCall) -> None:
        self.name, self.call = name, call
        self.seconds: dict[str, list[float]] = {}
        self.failed = ""
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> "_Served":
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def begin(self) -> None:
        """Start the process, and wait until it has warmed up."""
        command = [sys.executable, "-m", "comparison.processes", self.call.function, json.dumps(self.call.arguments)]
        # A file, as a pipe that nobody reads fills up.
        complaints = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # the stack closes it
        self.complaints = self.stack.enter_context(complaints)
        self.process = self.stack.enter_context(
            subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.complaints, text=True
            )
        )
        self.stack.callback(self.process.kill)
        ready = self._answer()
        self.seconds = {name: [] for name in ready.get("runs", ())}

    def run_each(self) -> None:
        """Time each of its runs once."""
        for name, seconds in self.seconds.items():
            if not self.failed:
                answer = self._answer(name)
                seconds.append(answer.get("seconds", 0.0))

    def end(self) -> Measured:
        """Let it end, and say what came of it."""
        last = {} if self.failed else self._answer("")
        if self.failed:
            return Measured({}, failed=self.failed)
        timings = {name: Timing(tuple(seconds)) for name, seconds in self.seconds.items()}
        return Measured(timings, last["peak"], last["own"], last["facts"])

    def _answer(self, line: str | None = None) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            if line is not None:
                self.process.stdin.write(line + "\n")
                self.process.stdin.flush()
        text = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(text) if text else self._why_it_ended()
        self.failed = answer.get("failed", "")
        return answer

    def _why_it_ended(self) -> dict[str, str]:
        """A process that the system killed had run out of memory; anything else is a fault."""
        if self.process.wait() == -signal.SIGKILL:
            return {"failed": OUT_OF_MEMORY}
        self.complaints.seek(0)
        said = self.complaints.read().strip().splitlines()
        raise RuntimeError(f"the case {self.name!r} failed: {said[-1] if said else self.process.returncode}")


def _memory(device_type: str, which: str) -> float | None:
    """Megabytes: the most there ever were ("peak") or those of now ("now"); None where the system does not tell."""
    import torch

    if device_type == "cuda":
        peak = which == "peak"
        return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 2**20
    size = resident_memory(peak=which == "peak") if device_type == "cpu" else None
    return None if size is None else size / 2**20


def _serve(function: str, arguments: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # should memory run out, then of the system's choices this process is the one
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    module, name = function.split(":")
    case: Case = getattr(importlib.import_module(module), name)(**arguments)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the peak up to here
    if case.device_type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    before = _memory(case.device_type, "now")
    repeats = {}
    for name, run in case.runs.items():
        for _ in range(3):
            run()
        repeats[name] = max(1, round(AT_LEAST_SECONDS / max(1e-6, seconds_of(run, 1))))
    _say(runs=list(case.runs))
    for line in sys.stdin:
        name = line.strip()
        if not name:
            break
        _say(seconds=seconds_of(case.runs[name], repeats[name]) / repeats[name])
    peak = _memory(case.device_type, "peak")
    own = None if peak is None or before is None else peak - before
    _say(peak=peak, own=own, facts=dict(case.facts()))


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    try:
        _serve(sys.argv[1], json.loads(sys.argv[2]))
    except (MemoryError, RuntimeError) as failure:
        if not is_out_of_memory(failure):
            raise
        _say(failed=OUT_OF_MEMORY)
