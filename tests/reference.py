"""Independent oracles: attention written as loops, and its backward pass written by hand.

Nothing here calls the functions under test.
"""

import math

import torch
from torch import Tensor

Weights = dict[str, Tensor]  # "query", "key", "value", "output": (C, C) matrices W in y = x W


def loop_attention(queries: Tensor, keys: Tensor, values: Tensor, blocked: Tensor) -> Tensor:
    """Attention one query at a time: (T, D), (S, D), (S, D), (T, S) bool -> (T, D)."""
    context = torch.zeros(queries.shape[0], values.shape[1], dtype=values.dtype)
    for t in range(queries.shape[0]):
        allowed = [s for s in range(keys.shape[0]) if not blocked[t, s]]
        scores = [sum(q * k for q, k in zip(queries[t].tolist(), keys[s].tolist(), strict=True)) for s in allowed]
        scaled = [score / math.sqrt(queries.shape[1]) for score in scores]
        exponentials = [math.exp(score - max(scaled)) for score in scaled]
        for s, exponential in zip(allowed, exponentials, strict=True):
            context[t] += values[s] * (exponential / sum(exponentials))
    return context


def split(x: Tensor, n_head: int) -> Tensor:
    """(B, T, C) -> (B, H, T, D), by stacking slices."""
    return torch.stack(x.chunk(n_head, dim=-1), dim=1)


def merge(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, C)."""
    return torch.cat(list(x.unbind(dim=1)), dim=-1)


def attention_forward(x: Tensor, weights: Weights, n_head: int, blocked: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Multi-head attention without biases, and what its backward pass needs."""
    q, k, v = (split(x @ weights[name], n_head) for name in ("query", "key", "value"))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = torch.where(blocked, torch.tensor(-math.inf, dtype=x.dtype), scores)
    exponentials = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    a = exponentials / exponentials.sum(dim=-1, keepdim=True)
    context = merge(a @ v)
    return context @ weights["output"], {"q": q, "k": k, "v": v, "a": a, "context": context}


def attention_backward(
    x: Tensor, weights: Weights, n_head: int, blocked: Tensor, gradient: Tensor
) -> tuple[Tensor, Weights]:
    """Gradients of sum(gradient * output) for x and for each weight, formula by formula (no dropout)."""
    _, kept = attention_forward(x, weights, n_head, blocked)
    q, k, v, a = kept["q"], kept["k"], kept["v"], kept["a"]
    root = math.sqrt(q.shape[-1])
    d_output = torch.einsum("btc,btd->cd", kept["context"], gradient)
    g = split(gradient @ weights["output"].T, n_head)
    da = g @ v.mT
    dv = a.mT @ g
    ds = a * (da - (a * da).sum(dim=-1, keepdim=True))
    dq, dk, dv = merge(ds @ k / root), merge(ds.mT @ q / root), merge(dv)
    gradients = {name: torch.einsum("btc,btd->cd", x, d) for name, d in (("query", dq), ("key", dk), ("value", dv))}
    dx = dq @ weights["query"].T + dk @ weights["key"].T + dv @ weights["value"].T
    return dx, {**gradients, "output": d_output}
