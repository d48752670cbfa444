"""Autoregressive generation: one token after another, each from the model's own words so far.

`generate` yields token ids and prints nothing; text is made of them in engine/text_stream.py.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine.decoding import NextLogits
from engine.evaluation import evaluation_mode
from model import GPT


def generate(
    model: GPT,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    first_sample: int = 0,
    kv_cache: bool = True,
    context_shift: int = 0,
    next_logits: NextLogits | None = None,
) -> Iterator[Tensor]:
    """Continue every row of a prompt, without dropout and without gradients.

    The model sees a window of at most block_size tokens, and the cache saves recomputing its earlier positions.
    When the window is full, its oldest `context_shift` tokens are forgotten; every position then changes, so that
    what is left is computed afresh, with a cache or without, and both give the same ids.

    Args:
        model: in any mode; its mode is restored after every token.
        prompt: (B, T) token ids, T >= 1.
        max_new_tokens: how many to yield.
        temperature: 0 takes the likeliest token; above, the logits are divided by it.
        top_k: sample among the k likeliest tokens; 0 = all.
        top_p: sample among the smallest set of likeliest tokens with this total probability.
        seed, first_sample: row b draws from a random stream of its own that depends on seed and
            first_sample + b alone.
        kv_cache: keep keys and values between tokens.
        context_shift: 1 keeps the window full, at the price of computing it for every token; 0 = a quarter of
            block_size, so that three quarters are always seen.
        next_logits: made earlier for this model and as many rows, so that several calls share its preparation;
            decides on the cache, too.

    Yields:
        (B,) the next token id of every row.

    Raises:
        ValueError: the prompt is empty or not (B, T), or a sampling value is out of range.
        FloatingPointError: the logits are not finite.
    """
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(f"the prompt has shape {tuple(prompt.shape)}: expected (B, T) with at least one token")
    block_size = model.config.block_size
    if not 0 <= context_shift <= block_size:
        raise ValueError(f"context_shift = {context_shift}: expected 0 to block_size = {block_size}")
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature {temperature} and top_k {top_k} must not be negative, top_p {top_p} in (0, 1]")
    streams = [sample_stream(seed, first_sample + row) for row in range(prompt.shape[0])]
    if next_logits is None:
        positions = prompt.shape[1] + max_new_tokens
        next_logits = NextLogits(model, prompt.shape[0], kv_cache=kv_cache, positions=positions)
    next_logits.clear()
    window = prompt[:, -block_size:]  # (B, at most block_size)
    for position in range(max_new_tokens):
        with evaluation_mode(model):
            logits = next_logits(window)  # (B, V)
            if not bool(torch.isfinite(torch.stack(torch.aminmax(logits))).all()):
                raise FloatingPointError(f"the logits are not finite at new token {position + 1}")
            uniforms = torch.tensor([stream.random() for stream in streams], dtype=torch.float64)
            next_ids = choose_tokens(logits, uniforms, temperature=temperature, top_k=top_k, top_p=top_p)
            if window.shape[1] == block_size:
                window = window[:, context_shift or max(1, block_size // 4) :]
                next_logits.clear()
            window = torch.cat((window, next_ids[:, None]), dim=1)
        yield next_ids.clone()  # outside inference mode, so that it may also go into training


def sample_stream(seed: int, sample: int) -> np.random.Generator:
    """The random stream of one sample: Philox keyed by seed and sample, the same on every device."""
    return np.random.Generator(np.random.Philox(key=[seed, sample]))


def choose_tokens(
    logits: Tensor, uniforms: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Draw one token id a row.

    Args:
        logits: (B, V), finite.
        uniforms: (B,) float64 on the CPU, each in [0, 1): the place in the cumulative distribution.
        temperature, top_k, top_p: as in `generate`; top_k is applied before top_p.

    Returns:
        (B,) int64 on the logits' device.

    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration" (top_p, nucleus sampling);
    Fan et al. 2018, "Hierarchical Neural Story Generation" (top_k).
    """
    if logits.dtype.itemsize < 4:
        logits = logits.float()  # on a CPU, searching half-precision numbers takes five times as long
    if temperature == 0:
        return logits.argmax(dim=-1)
    # On the CPU, so that the same logits give the same draw on every device.
    candidates, ids = logits.cpu(), None  # (B, V)
    if 0 < top_k < candidates.shape[-1]:
        candidates, ids = candidates.topk(top_k, dim=-1)  # (B, k)
    # Subtracting the largest first keeps a tiny temperature from overflowing.
    scaled = (candidates - candidates.amax(dim=-1, keepdim=True)) / temperature  # 0 at the likeliest
    probabilities = scaled.softmax(dim=-1)
    if top_p < 1:
        probabilities = _nucleus(probabilities, top_p)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    # The first candidate whose cumulative probability exceeds the draw; those of probability 0 are never that.
    draws = (uniforms * cumulative[:, -1])[:, None]
    chosen = torch.searchsorted(cumulative, draws, right=True)  # (B, 1)
    return (chosen if ids is None else ids.gather(-1, chosen))[:, 0].to(logits.device)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the likeliest tokens whose total first reaches top_p; always at least one stays."""
    ordered, indices = probabilities.sort(dim=-1, descending=True)
    reached_before = ordered.cumsum(dim=-1) - ordered >= top_p
    return torch.zeros_like(probabilities).scatter(-1, indices, ordered.masked_fill(reached_before, 0.0))
