"""Which device and which precision, what `auto` picks and why, and how a step is run on them.

CUDA is asked nothing unless the device may be CUDA.
"""

import contextlib
import ctypes
import re
import sys
from pathlib import Path
from typing import Any

import torch

from config.errors import UserError, reason_of
from model import GPT

# Processor features that multiply bfloat16 natively; without one, bfloat16 is emulated and slower than float32.
CPU_BFLOAT16 = ("avx512_bf16", "amx_bf16", "sve_bf16", "bf16")

# Peak dense operations per second with 16-bit numbers, from the vendor's data sheets, by a word of the device's name.
KNOWN_PEAKS = {
    "V100": 125e12, "T4": 65e12, "A100": 312e12, "L4": 121e12, "L40S": 362e12, "H100": 989e12, "H200": 989e12,
    "B200": 2250e12,
}  # fmt: skip
SLOWER_FORMS = {"PCIe", "NVL", "MIG", "GH200"}  # other peaks under the same names, which nobody should be told


def choose_device(requested: str) -> torch.device:
    """The device of that name; `auto` takes CUDA, else Apple's GPU, else the CPU.

    Raises:
        UserError: the device is not there.
    """
    if requested == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device(requested)
    present = device.type == "cpu"
    if device.type == "cuda":
        present = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    elif device.type == "mps":
        present = torch.backends.mps.is_available()
    if not present:
        raise UserError(f"device = {requested}: PyTorch finds no such device here; use --device=auto or cpu")
    return device


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, so that every step reuses that of the step before.

    glibc otherwise gives each large block back to the system, which clears it page by page when the next step
    asks for it: a third of the time of a step on a CPU. Where the C library is another one, nothing happens.
    """
    trim_threshold, largest_number_of_mappings = -1, -4  # names in malloc.h: M_TRIM_THRESHOLD, M_MMAP_MAX
    with contextlib.suppress(AttributeError, OSError, TypeError):  # other systems lack the function or the library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(largest_number_of_mappings, 0)


def choose_dtype(requested: str, device: torch.device, *, training: bool) -> tuple[torch.dtype, str]:
    """The precision of that name and the reason for it.

    Args:
        requested: auto, float32, bfloat16 or float16.
        device: where it will be used.
        training: float16 then needs a loss scaler, which only CUDA has.

    Raises:
        UserError: the precision was asked for by name and the device lacks it.
    """
    if requested != "auto":
        if requested == "float16" and training and device.type != "cuda":
            raise UserError(f"dtype = float16: needs a loss scaler, so a CUDA device, not {device}; use bfloat16")
        if requested == "bfloat16" and device.type == "cuda" and not _cuda_has_bfloat16(device):
            raise UserError(f"dtype = bfloat16: {torch.cuda.get_device_name(device)} lacks it; use float16 or float32")
        return getattr(torch, requested), "as asked"
    if device.type == "cuda":
        if _cuda_has_bfloat16(device):
            return torch.bfloat16, "auto: this GPU has it"
        return torch.float16, "auto: this GPU lacks bfloat16"
    if device.type == "cpu" and training and any(torch.cpu.get_capabilities().get(name) for name in CPU_BFLOAT16):
        return torch.bfloat16, "auto: this processor multiplies it natively"
    return torch.float32, "auto: the safe choice on this device"


def _cuda_has_bfloat16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)  # from Ampere on; older ones emulate it


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Matrix products in `dtype`, the rest where it is safe; nothing at all for float32 and float64."""
    if dtype.itemsize >= 4:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def peak_flops(requested: float, device: torch.device, dtype: torch.dtype) -> float | None:
    """The operations per second that utilisation is measured against, or None where nobody knows them.

    Args:
        requested: the user's figure, 0 for none.
        device: CUDA devices are looked up by name; nothing else is.
        dtype: of the matrix products; the known peaks are those of 16-bit numbers.
    """
    if requested:
        return requested
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    words = set(re.split(r"[^A-Za-z0-9]+", torch.cuda.get_device_name(device)))
    found = [peak for name, peak in KNOWN_PEAKS.items() if name in words]
    return found[0] if found and not words & SLOWER_FORMS else None


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _linux_figure("/proc/meminfo", "MemAvailable:") if device.type == "cpu" else None


def resident_memory(*, peak: bool) -> int | None:
    """Bytes that this process has in memory, or the most it ever had; None where the system does not tell.

    getrusage's figure begins with that of the process that started this one.
    """
    return _linux_figure("/proc/self/status", "VmHWM:" if peak else "VmRSS:")


def _linux_figure(path: str, name: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii").split(name)[1].split()[0]) * 1024  # it is in kilobytes
    except (OSError, IndexError, ValueError):
        return None


def describe_device(device: torch.device) -> str:
    """The device in words, for the log."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)


def add_up_in_order() -> None:
    """Have compiled code add up the embedding's gradients in a fixed order, as code that is not compiled does."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # or all memory is cleared first


def compiled_or_eager(model: GPT, inputs: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype) -> torch.nn.Module:
    """The model compiled, or the model itself with one warning where compiling does not work.

    torch.compile fails at the first call, not when it is made, so one forward and backward pass is tried.
    """
    if inputs.device.type == "cpu":
        add_up_in_order()
    compiled = torch.compile(model)
    try:
        with autocast(inputs.device, dtype):
            _, loss = compiled(inputs, targets, return_logits=False)
        loss.backward()
    except Exception as error:  # whatever the compiler throws, eager execution works
        print(f"compile: does not work here ({reason_of(error)}); going on without", file=sys.stderr)
        return model
    finally:
        model.zero_grad(set_to_none=True)
    return compiled  # type: ignore[return-value]
