"""What a training step takes, before it is taken: memory worked out, then memory and time measured (`--dry_run`)."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from config.errors import UserError
from config.schema import TrainSettings
from data.dataset import PreparedData
from engine.device import free_memory, resident_memory
from engine.distributed import world_size
from engine.run import Run
from engine.shards import tensors_of
from engine.step_memory import StepMemory, predicted_memory

MEASURED_UPDATES = 3


def foresee(settings: TrainSettings, data: PreparedData, device: torch.device, dtype: torch.dtype) -> StepMemory:
    """The memory that an update will take.

    Raises:
        UserError: there is not as much, or there are several processes.
    """
    if world_size() > 1:
        raise UserError("dry_run: is for one process; leave torchrun out (docs/scaling.md says what several share)")
    memory, free = predicted_memory(settings, data.tokenizer.vocab_size, device, dtype), free_memory(device)
    if free is not None and memory.peak > free:
        raise UserError(
            f"an update takes {megabytes(memory.peak)} of memory, and {device} has {megabytes(free)} free; lower "
            f"--batch_size and raise --gradient_accumulation_steps, or add --activation_checkpointing"
        )
    return memory


def rehearse(run: Run, tokens: int, expected: StepMemory, one_update: Callable[[int], object]) -> dict[str, str]:
    """Do a few updates; what they take, beside what was expected.

    Args:
        run: whose settings and data they are.
        tokens: of an update.
        expected: from `foresee`.
        one_update: does the update of that number.
    """
    settings = run.settings
    lasting = lambda: bytes_of(run.model.state_dict()) + bytes_of(run.optimizer.state_dict())  # noqa: E731
    measured = measured_updates(one_update, lasting, run.model.device)
    told = f"; measured {megabytes(measured.peak)}" if measured.peak is not None else ""
    resident = f", in a process of {megabytes(measured.resident)}" if measured.resident is not None else ""
    a_pass = measured.seconds * run.data.metadata.train_tokens / tokens
    return {
        "parameters": megabytes(expected.parameters),
        "gradients": megabytes(expected.gradients),
        "optimizer": f"{megabytes(expected.optimizer)} of state ({settings.optimizer})",
        "activations": f"{megabytes(expected.activations)} kept by the forward pass of a micro-batch of "
        f"{settings.batch_size:,} x {settings.block_size:,} tokens",
        "peak": f"expected {megabytes(expected.peak)} at the fullest moment of an update{told}{resident}",
        "update": f"{1000 * measured.seconds:,.1f} ms for {tokens:,} tokens, {tokens / measured.seconds:,.0f} tokens/s",
        "in all": f"{duration(a_pass)} for a pass over the data, {duration(measured.seconds * settings.max_iters)} for "
        f"{settings.max_iters:,} updates, without validations",
    }


def megabytes(size: int) -> str:
    """Bytes in words."""
    return f"{size / 2**20:,.1f} MB"


def duration(seconds: float) -> str:
    """Seconds in words."""
    minutes, hours = seconds / 60, seconds / 3600
    return f"{hours:,.1f} hours" if hours >= 1 else f"{minutes:.1f} minutes" if minutes >= 1 else f"{seconds:.1f} s"


@dataclass(frozen=True)
class Measured:
    """What updates took.

    Attributes:
        seconds: of an update, the median of a few.
        peak: bytes of tensors at the fullest moment; None where the device does not tell.
        resident: bytes that the whole process has in memory, with Python and PyTorch; None where the system does not
            tell, or where tensors are elsewhere.
    """

    seconds: float
    peak: int | None
    resident: int | None


def bytes_of(content: object) -> int:
    """Of all tensors in it."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors_of(content).values())


def measured_updates(one_update: Callable[[int], object], lasting: Callable[[], int], device: torch.device) -> Measured:
    """Do a few updates and see what they take.

    Args:
        one_update: does the update of that number.
        lasting: gives the bytes of parameters and optimizer state, which are there before and after an update.
        device: where.
    """

    def timed(step: int) -> float:
        started = time.perf_counter()
        one_update(step)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    timed(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median(timed(step) for step in range(1, 1 + MEASURED_UPDATES))
    if device.type == "cuda":
        return Measured(seconds, torch.cuda.max_memory_allocated(device), None)
    if device.type != "cpu":
        return Measured(seconds, None, None)
    resident = resident_memory(peak=True)
    return Measured(seconds, lasting() + _peak_on_cpu(lambda: one_update(1 + MEASURED_UPDATES)), resident)


def _peak_on_cpu(run: Callable[[], object]) -> int:
    """The most bytes that PyTorch's allocator gave out at once while something ran, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    now = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        peak = max(peak, now)
    return peak
