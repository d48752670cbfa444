"""From token files to tensors: random training batches and the validation windows.

A training batch is a pure function of (seed, step), so a resumed run reads what the uninterrupted one would
have read, and evaluation cannot disturb the order.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from config.errors import UserError
from data.dataset import TokenFile


class TrainingBatches:
    """Random windows of the training tokens, each with its targets one token further.

    Args:
        tokens: the training file.
        block_size: T, tokens in a window.
        batch_size: B, windows in a micro-batch.
        micro_batches: micro-batches in one update (gradient accumulation).
        seed: decides the windows, together with the step.
        device: where the tensors go.
        own: which micro-batches to read, where several processes share them; all of them when not given.

    Raises:
        UserError: there are fewer tokens than one window needs.
    """

    def __init__(
        self,
        tokens: TokenFile,
        *,
        block_size: int,
        batch_size: int,
        micro_batches: int,
        seed: int,
        device: torch.device,
        own: range | None = None,
    ) -> None:
        if len(tokens) < block_size + 1:
            raise UserError(
                f"{tokens.path}: {len(tokens):,} tokens, but block_size = {block_size} needs at least "
                f"{block_size + 1:,}; use a smaller --block_size or more text"
            )
        self.tokens, self.seed, self.device = tokens, seed, device
        self.block_size, self.batch_size, self.micro_batches = block_size, batch_size, micro_batches
        self.own = range(micro_batches) if own is None else own

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one update learns from."""
        return self.micro_batches * self.batch_size * self.block_size

    def global_batch(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The own micro-batches of one update: inputs and targets, (B, T) int64 each.

        Source of the random numbers: Salmon et al. 2011, Philox, keyed by seed and step.
        """
        random = np.random.Generator(np.random.Philox(key=[self.seed, step]))
        last_start = len(self.tokens) - self.block_size - 1
        starts = random.integers(0, last_start, size=(self.micro_batches, self.batch_size), endpoint=True)
        for micro_starts in starts[self.own.start : self.own.stop]:
            windows = self.tokens.windows(micro_starts, self.block_size + 1)  # (B, T + 1)
            yield inputs_and_targets(windows, self.device)


def validation_batches(
    tokens: TokenFile, *, block_size: int, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every token but the first, scored exactly once: windows side by side, the last one shorter.

    Yields:
        Inputs and targets, (B, T) int64 each; the shorter window comes alone, (1, remaining tokens).
    """
    predicted = len(tokens) - 1
    whole_windows = max(0, predicted // block_size)
    for first in range(0, whole_windows, batch_size):
        starts = np.arange(first, min(first + batch_size, whole_windows)) * block_size
        yield inputs_and_targets(tokens.windows(starts, block_size + 1), device)
    remaining = predicted - whole_windows * block_size
    if remaining > 0:
        yield inputs_and_targets(tokens.windows(np.array([whole_windows * block_size]), remaining + 1), device)


def inputs_and_targets(windows: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Windows (B, T + 1) -> each token, and the token after it: (B, T) int64 each."""
    tensor = torch.from_numpy(windows)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    tensor = tensor.to(device, non_blocking=True)
    return tensor[:, :-1], tensor[:, 1:]
