"""How good a model is: one full, deterministic pass over tokens.

python -m engine.evaluation runs/quick                              on the run's own validation tokens
python -m engine.evaluation runs/quick --data=another_text.txt      on a text, or a folder that prepare.py wrote

Knows nothing of training; it disturbs neither the model's mode nor any random stream.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from config.command_line import parse
from config.errors import UserError, run_command
from config.preparation import PreparationFields
from config.schema import EvaluateSettings
from data.batches import validation_batches
from data.dataset import PreparedData, TokenFile, refuse_other_data
from data.preparation import prepare_if_needed
from data.tokenizers import Tokenizer
from engine.checkpoint import load_checkpoint, model_from_checkpoint, newest_checkpoint, tokenizer_from_checkpoint
from engine.device import autocast, choose_device, choose_dtype
from engine.distributed import rank, totals, world_size
from model import GPT

TOKENS_AT_ONCE = 8192  # at least, as small batches cost the more time the smaller they are


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

    Several processes take the batches in turn.

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
        for inputs, targets, counts in shared_in_turn(batches):
            with autocast(inputs.device, dtype):
                _, loss = model(inputs, targets, return_logits=False)
            if not counts:
                continue
            nats += loss.item() * targets.numel()
            tokens += targets.numel()
            text_bytes += int(byte_lengths[targets].sum())
    nats, scored, scored_bytes = totals(nats, tokens, text_bytes)
    if scored == 0:
        raise ValueError("there are no tokens to score")
    return Evaluation(nats / scored, nats / math.log(2) / max(1, scored_bytes), int(scored))


def shared_in_turn(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """The batches that this process takes of several, and whether each counts.

    All processes take as many: for those that have none left in the last round, a batch of another one stands in,
    since a model that is shared computes nothing unless all of them do.
    """
    remaining = iter(batches)
    while one_round := list(itertools.islice(remaining, world_size())):
        counts = rank() < len(one_round)
        yield *one_round[rank() if counts else -1], counts


def evaluate_tokens(
    model: GPT, tokens: TokenFile, tokenizer: Tokenizer, dtype: torch.dtype, *, batch_size: int = 1
) -> Evaluation:
    """Score every token but the first once, in windows of the model's context side by side.

    Args:
        model: of the tokenizer.
        tokens: at least two.
        tokenizer: tells how many bytes of text each token is.
        dtype: precision of the forward pass.
        batch_size: windows at once, at least.
    """
    block_size, device = model.config.block_size, model.device
    windows = validation_batches(
        tokens, block_size=block_size, batch_size=max(batch_size, TOKENS_AT_ONCE // block_size), device=device
    )
    byte_lengths = torch.from_numpy(tokenizer.byte_lengths()).to(device)
    return evaluate(model, windows, byte_lengths, dtype)


def data_to_evaluate(settings: EvaluateSettings, own: dict[str, Any], tokenizer: Tokenizer) -> PreparedData:
    """The data that is named, a text prepared with the model's tokenizer; else that of the run itself.

    Args:
        settings: what is asked for.
        own: the run's record of its own data.
        tokenizer: of the model.

    Raises:
        UserError: it cannot be had, was prepared with another tokenizer, or is no longer the run's own.
    """
    if settings.data and not (Path(settings.data) / "meta.json").is_file():
        options = PreparationFields(val_fraction=0.0, encoding=settings.encoding, text_field=settings.text_field)
        return prepare_if_needed(settings.data, options, tokenizer)
    if not (settings.data or own["folder"]):
        raise UserError(f"{settings.run}: has no data of its own; name some with --data")
    data = PreparedData(Path(settings.data or own["folder"]))
    if not settings.data:
        refuse_other_data(data, own)
    if data.metadata.tokenizer_sha256 != tokenizer.sha256():
        raise UserError(
            f"{data.folder}: was prepared with another tokenizer ({data.metadata.tokenizer}) than the model's "
            f"({tokenizer.name}); name the text itself, so that it is prepared with the right one"
        )
    return data


def main(argv: list[str]) -> None:
    """Say how good the model of a run is on some data."""
    settings = parse(EvaluateSettings, argv)
    path = newest_checkpoint(Path(settings.run))
    checkpoint = load_checkpoint(path)
    tokenizer = tokenizer_from_checkpoint(checkpoint, path)
    data = data_to_evaluate(settings, checkpoint["data"], tokenizer)
    device = choose_device(settings.device)
    dtype, reason = choose_dtype(settings.dtype, device, training=True)
    model = model_from_checkpoint(checkpoint, path).to(device).eval()
    parts = {"validation": data.validation, "training": data.train}
    name = settings.part or ("validation" if len(data.validation) else "training")
    if len(parts[name]) < 2:
        raise UserError(f"{data.folder}: has no {name} tokens to score; choose the other --part")
    result = evaluate_tokens(model, parts[name], tokenizer, dtype)
    precision = str(dtype).removeprefix("torch.")
    print(f"model       {path}: step {checkpoint['step']:,}, on {device} in {precision} ({reason})")
    print(f"data        {data.metadata.source}: its {name} part, {result.tokens:,} tokens scored")
    print(f"loss        {result.loss:.4f} nats per token")
    print(f"perplexity  {result.perplexity:.2f}")
    print(f"bits        {result.bits_per_byte:.4f} per byte of text")


if __name__ == "__main__":
    run_command(main)
