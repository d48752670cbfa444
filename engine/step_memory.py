"""How much memory a training step takes, worked out without taking any.

The step runs on tensors that have shapes but no numbers (PyTorch's FakeTensorMode) while their bytes are counted, so
that whatever the settings choose is in the count: the attention path, the precision, recomputation, the optimizer.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config.schema import TrainSettings
from engine.activations import checkpoint_activations
from engine.device import autocast
from engine.optimizer import make_optimizer
from model import GPT


@dataclass(frozen=True)
class StepMemory:
    """Bytes of tensors.

    Attributes:
        parameters, gradients, optimizer: as they say; `optimizer` is its state.
        activations: what the forward pass of one micro-batch keeps for the backward pass; among it autocast's copies
            of the weights, and the gradient of the head where the loss is taken in chunks.
        peak: the most there is at any moment of an update.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    peak: int


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, from when they are made to when nobody has them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.sizes or not isinstance(size, int):  # what depends on numbers is as small as a list of padding
            return
        self.sizes[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def predicted_memory(settings: TrainSettings, vocab_size: int, device: torch.device, dtype: torch.dtype) -> StepMemory:
    """The memory of an update, on one device and not compiled, without taking any of it.

    Args:
        settings: of the run.
        vocab_size: of its tokenizer.
        device: where it would train.
        dtype: of the matrix products.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()), _LiveBytes() as live:
        with device:
            model = GPT(settings.gpt_config(vocab_size))
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        parameters = live.now
        optimizer = make_optimizer(model, settings)
        ids = torch.zeros(settings.batch_size, settings.block_size, dtype=torch.int64, device=device)
        activations = gradients = state = 0
        for _ in range(2):  # the first update has no optimizer state yet
            live.peak = live.now
            for _ in range(min(2, settings.gradient_accumulation_steps)):  # the second one adds to gradients
                before = live.now
                with autocast(device, dtype):
                    _, loss = model(ids, ids, return_logits=False)
                activations = live.now - before
                loss.backward()
                del loss
                gradients = gradients or live.now - before
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
            before = live.now
            optimizer.step()
            state = state or live.now - before
            optimizer.zero_grad()
    return StepMemory(parameters, gradients, state, activations, live.peak)
