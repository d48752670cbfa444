"""Several processes as one: who this one is among those that torchrun started, and what they tell each other.

All of it is PyTorch's own engine; without torchrun there is one process, and nothing here does anything.
"""

import contextlib
import datetime
import gc
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from config.errors import UserError, reason_of

LOST = ("connection closed", "connection reset", "timed out", "timeout", "socket", "broken pipe")  # gloo's words for it


def rank() -> int:
    """The number of this process, 0 for the first or the only one."""
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


def world_size() -> int:
    """How many processes there are."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return rank() == 0


def was_restarted() -> bool:
    """Whether torchrun has started the processes again, after one was lost."""
    return dist.is_torchelastic_launched() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def own_device(device: torch.device) -> torch.device:
    """This process's GPU, where several share a machine and none was named by number."""
    if world_size() == 1 or device.type != "cuda":
        return device
    own = device if device.index is not None else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)  # where PyTorch's engine looks for it
    return own


@contextlib.contextmanager
def process_group(device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """The processes joined while the block runs: by NCCL on CUDA, by gloo elsewhere.

    Args:
        device: of this process.
        timeout_seconds: a message that takes longer means that a process was lost.

    Raises:
        UserError: another process was lost, or torchrun may restart processes that could not find each other.
    """
    if world_size() == 1:
        yield
        return
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        raise UserError(
            "torchrun --max-restarts: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, as restarted processes "
            "do not find each other otherwise"
        )
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(seconds=timeout_seconds)
        )
        yield
        wait_for_all()  # one that leaves earlier looks lost to the others
    except (dist.DistError, RuntimeError) as error:
        if not means_lost(error):
            raise
        raise UserError(
            f"process {rank()} of {world_size()}: lost another one ({reason_of(error)}); the last checkpoint is whole, "
            f"go on with --resume"
        ) from None
    finally:
        if dist.is_initialized():
            gc.collect()  # what lies in reference cycles and uses the group aborts the process when it goes after it
            dist.destroy_process_group()


def means_lost(error: BaseException) -> bool:
    """Whether an error means that another process was lost."""
    said = str(error).lower()
    return isinstance(error, dist.DistError) or (dist.is_initialized() and any(word in said for word in LOST))


def own_micro_batches(micro_batches: int) -> range:
    """Which micro-batches of every update this process computes, so that all of them together do not depend on how many
    processes there are.

    Raises:
        UserError: they cannot be shared evenly; said once.
    """
    size = world_size()
    share, rest = divmod(micro_batches, size)
    if rest or not share:
        nearest = max(1, round(micro_batches / size)) * size
        raise UserError(
            f"gradient_accumulation_steps = {micro_batches}: {size} processes share the micro-batches of an update, so "
            f"expected a multiple of {size}; the nearest is {nearest}"
        )
    return range(rank() * share, (rank() + 1) * share)


def replicated(model: nn.Module, device: torch.device) -> nn.Module:
    """The model such that its gradients are those of all processes, averaged; the model itself where there is one."""
    if world_size() == 1:
        return model
    # Gradients lie in what is sent, instead of being there a second time.
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
    )


def unsynchronised(forward: nn.Module, until_last: bool) -> contextlib.AbstractContextManager[object]:
    """Collect gradients without averaging them yet, as for all micro-batches of an update but the last."""
    return (
        forward.no_sync() if until_last and isinstance(forward, DistributedDataParallel) else contextlib.nullcontext()
    )


def summed(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def totals(*numbers: float) -> list[float]:
    """Each number summed over all processes, in float64; every process must ask."""
    if not dist.is_initialized():
        return list(numbers)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    totalled: list[float] = summed(torch.tensor(numbers, dtype=torch.float64, device=device)).tolist()
    return totalled


def any_of_all(flag: bool) -> bool:
    """Whether it is so in any process; every process must ask, and gets the same answer."""
    return totals(flag)[0] > 0


def told_by_first(value: str) -> str:
    """What the first process says; every process must ask."""
    told = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    return told[0]


@contextlib.contextmanager
def first_one_first() -> Iterator[None]:
    """The first process runs the block, then the others, who find what it has made."""
    if dist.is_initialized() and not is_first():
        dist.barrier()
    yield
    if dist.is_initialized() and is_first():
        dist.barrier()


def wait_for_all() -> None:
    """Go on when every process has come here."""
    if dist.is_initialized():
        dist.barrier()


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """What every process finds wrong is reported by the first alone."""
    try:
        yield
    except UserError:
        if not is_first():
            raise SystemExit(2) from None
        raise
