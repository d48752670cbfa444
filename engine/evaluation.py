"""How good a model is: one full, deterministic pass over the validation tokens.

Knows nothing of training; it disturbs neither the model's mode nor any random stream.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from engine.device import autocast


@dataclass(frozen=True)
class Evaluation:
    """The result of one pass.

    Attributes:
        loss: mean cross-entropy in nats per token, over all scored tokens.
        bits_per_byte: the same information per byte of text, comparable across tokenizers.
        tokens: how many were scored.
    """

    loss: float
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradients inside; afterwards the mode is what it was."""
    was_training = model.training
    if was_training:
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if was_training:
            model.train()


def evaluate(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], byte_lengths: Tensor, dtype: torch.dtype
) -> Evaluation:
    """Score every target of every batch once; the mean is over tokens, so a short last batch weighs less.

    Args:
        model: a GPT, compiled or not.
        batches: inputs and targets (B, T), as `data.batches.validation_batches` gives them.
        byte_lengths: (V,) bytes of text of each token id, on the model's device.
        dtype: precision of the forward pass.

    Raises:
        ValueError: there is nothing to score.
    """
    nats, tokens, text_bytes = 0.0, 0, 0
    with evaluation_mode(model):
        for inputs, targets in batches:
            with autocast(inputs.device, dtype):
                _, loss = model(inputs, targets, return_logits=False)
            nats += loss.item() * targets.numel()
            tokens += targets.numel()
            text_bytes += int(byte_lengths[targets].sum())
    if tokens == 0:
        raise ValueError("there are no tokens to score")
    return Evaluation(nats / tokens, nats / math.log(2) / max(1, text_bytes), tokens)
