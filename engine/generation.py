"""Autoregressive generation: one token after another, each from the model's own words so far.

`generate` yields token ids and prints nothing; text is made of them in engine/text_stream.py.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine.evaluation import evaluation_mode
from model import GPT, KVCache


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
) -> Iterator[Tensor]:
    """Continue every row of a prompt, without dropout and without gradients.

    The model sees the last block_size tokens. Until the window is full, the cache saves recomputing earlier
    positions; once it slides, every position changes, so the window is computed afresh for each token, with
    a cache or without, and both give the same ids.

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

    Yields:
        (B,) the next token id of every row.

    Raises:
        ValueError: the prompt is empty or not (B, T), or a sampling value is out of range.
        FloatingPointError: the logits are not finite.
    """
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(f"the prompt has shape {tuple(prompt.shape)}: expected (B, T) with at least one token")
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature {temperature} and top_k {top_k} must not be negative, top_p {top_p} in (0, 1]")
    block_size = model.config.block_size
    streams = [sample_stream(seed, first_sample + row) for row in range(prompt.shape[0])]
    cache = _new_cache(model, prompt.shape[0], prompt.shape[1] + max_new_tokens) if kv_cache else None
    window = prompt[:, -block_size:]  # (B, at most block_size)
    for position in range(max_new_tokens):
        with evaluation_mode(model):
            logits = _next_logits(model, window, cache)  # (B, V)
            if not bool(torch.isfinite(logits).all()):
                raise FloatingPointError(f"the logits are not finite at new token {position + 1}")
            uniforms = torch.tensor([stream.random() for stream in streams], dtype=torch.float64)
            next_ids = choose_tokens(logits, uniforms, temperature=temperature, top_k=top_k, top_p=top_p)
            window = torch.cat((window, next_ids[:, None]), dim=1)[:, -block_size:]
        yield next_ids.clone()  # outside inference mode, so that it may also go into training


def sample_stream(seed: int, sample: int) -> np.random.Generator:
    """The random stream of one sample: Philox keyed by seed and sample, the same on every device."""
    return np.random.Generator(np.random.Philox(key=[seed, sample]))


def _new_cache(model: GPT, batch_size: int, positions: int) -> KVCache:
    weight = model.token_embedding.weight
    length = min(model.config.block_size, positions)
    return KVCache(model.config, batch_size, device=weight.device, dtype=weight.dtype, max_length=length)


def _next_logits(model: GPT, window: Tensor, cache: KVCache | None) -> Tensor:
    """Logits (B, V) after the window (B, T), of which the cache may hold the first positions."""
    if cache is None:
        return model.logits(model.hidden_states(window)[:, -1])
    if cache.length >= model.config.block_size:
        cache.clear()
    return model.logits(model.hidden_states(window[:, cache.length :], cache=cache)[:, -1])


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
    if temperature == 0:
        return logits.argmax(dim=-1)
    # On the CPU in float64: the same logits give the same draw on every device, and the vocabulary is small.
    # Subtracting the largest first keeps a tiny temperature from overflowing.
    scaled = logits.cpu().double()
    scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / temperature  # (B, V), 0 at the likeliest
    if 0 < top_k < scaled.shape[-1]:
        values, indices = scaled.topk(top_k, dim=-1)
        scaled = torch.full_like(scaled, -torch.inf).scatter(-1, indices, values)
    probabilities = scaled.softmax(dim=-1)
    if top_p < 1:
        probabilities = _nucleus(probabilities, top_p)
    cumulative = probabilities.cumsum(dim=-1)
    # The first id whose cumulative probability exceeds the draw; ids of probability 0 are never that.
    draws = (uniforms * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, draws, right=True)[:, 0].to(logits.device)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the likeliest tokens whose total first reaches top_p; always at least one stays."""
    ordered, indices = probabilities.sort(dim=-1, descending=True)
    reached_before = ordered.cumsum(dim=-1) - ordered >= top_p
    return torch.zeros_like(probabilities).scatter(-1, indices, ordered.masked_fill(reached_before, 0.0))
