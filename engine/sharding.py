"""One model shared out over several processes, each of which keeps a part of every parameter (FSDP).

All of it is PyTorch's own `fully_shard` and DTensor: a parameter gives its whole shape, and holds the process's rows.
Without several processes nothing is shared, and PyTorch's part for it is not even imported.
"""

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed import world_size
from model import GPT, DecoderBlock


def shard(model: GPT, device: torch.device, dtype: torch.dtype) -> None:
    """Share out a model, in place: a block's parameters are put together when it computes, and only then.

    The numbers are those of a model that is not shared: the matrices of the blocks travel in the precision in which
    `autocast` multiplies them, everything else and all gradients in float32.

    Args:
        model: on the CPU, the same in every process.
        device: of this process; each block goes there, and leaves its share.
        dtype: of the matrix products.

    Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"; Rajbhandari et al.
    2020, "ZeRO", stage 3.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    # Once a process, and of no use to anyone: what is done instead is as right.
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    mesh = init_device_mesh(device.type, (world_size(),))
    exact = MixedPrecisionPolicy()
    narrow = MixedPrecisionPolicy(
        param_dtype=dtype if dtype.itemsize < 4 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.blocks:
        assert isinstance(block, DecoderBlock)
        # The norms, which autocast computes in float32.
        fully_shard([block.attention_add_norm, block.feed_forward_add_norm], mesh=mesh, mp_policy=exact)
        fully_shard(block, mesh=mesh, mp_policy=narrow)
    fully_shard(model, mesh=mesh, mp_policy=exact)
    register_fsdp_forward_method(model, "next_logits")


def is_shared(tensor: object) -> bool:
    """Whether a tensor is shared out over the processes."""
    if not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def own_share(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of it, where it is not shared."""
    share: Tensor = tensor.to_local() if is_shared(tensor) else tensor  # type: ignore[attr-defined]
    return share


def whole(tensor: Tensor) -> Tensor:
    """A tensor put together; every process must ask for it."""
    together: Tensor = tensor.full_tensor() if is_shared(tensor) else tensor  # type: ignore[attr-defined]
    return together


def shared_like(parameter: Tensor, value: Tensor) -> Tensor:
    """A whole tensor that every process has, shared out as a parameter of its shape is.

    One on the meta device has no numbers yet: its place is made, for numbers that come later.
    """
    if not is_shared(parameter) or not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return torch.zeros_like(value, device="cpu") if value.is_meta else value
    if value.shape != parameter.shape:
        raise ValueError(f"a state of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}")
    if value.is_meta:
        return torch.zeros_like(parameter)
    from torch.distributed.tensor import distribute_tensor

    # Every process cuts its own share out, so that nothing is sent.
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)  # type: ignore[attr-defined]


def on_whole_matrices(function: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    """Apply a function of whole matrices to a stack of them (N, rows, columns); the result has the same shape.

    Of matrices that are shared by rows, every process puts together some, applies it, and sends each process its rows.

    Source: Ahn et al. 2025, "Dion: Distributed Orthonormalized Updates", which does so for Muon, too.
    """
    if not is_shared(matrices):
        return function(matrices)
    from torch.distributed.tensor import DTensor, Shard

    some = matrices.redistribute(placements=[Shard(0)])  # type: ignore[attr-defined]
    made = function(some.to_local())
    together = DTensor.from_local(
        made, some.device_mesh, some.placements, shape=some.shape, stride=some.stride(), run_check=False
    )
    return together.redistribute(placements=matrices.placements)  # type: ignore[attr-defined]
