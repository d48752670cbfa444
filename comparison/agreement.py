"""Do manual and fused attention agree? Outputs and every gradient of both, against the manual path in float64.

The reference has the same weights and inputs, rounded to the precision in question, so that what differs is arithmetic.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from model import AttentionImpl, GPTConfig, LayerKVCache, MultiHeadAttention

PATHS: tuple[AttentionImpl, ...] = get_args(AttentionImpl)
LARGEST_DIFFERENCE = {"float64": 1e-10, "float32": 1e-5}  # of the largest value
B, NEW, CACHED = 2, 96, 32  # sequences, positions that are computed, and positions before them with a cache

Results = dict[str, Tensor]  # "output", and the gradient of each part by its name


@dataclass(frozen=True)
class Difference:
    """How far two results are apart at most: as a number, and as a share of the largest value of the first."""

    absolute: float
    relative: float


@dataclass(frozen=True)
class Agreement:
    """The output or the gradients of one case in one precision.

    Attributes:
        dtype: the precision.
        case: with or without padding and cache.
        of: "output", or "gradients" of x and of every weight and bias, of which the worst is kept.
        manual, sdpa: from the float64 reference.
        between: of SDPA from manual.
    """

    dtype: str
    case: str
    of: str
    manual: Difference
    sdpa: Difference
    between: Difference

    @property
    def agrees(self) -> bool:
        """Whether the paths are the same but for rounding.

        In half precision neither may be twice as far from the reference as the other and further than two roundings,
        as two roundings of one number may differ.
        """
        better, worse = sorted((self.manual.relative, self.sdpa.relative))
        if self.dtype in LARGEST_DIFFERENCE:
            return max(worse, self.between.relative) <= LARGEST_DIFFERENCE[self.dtype]
        return worse <= max(2 * better, 2 * torch.finfo(getattr(torch, self.dtype)).eps)


def agreements(dtypes: Sequence[str], n_embd: int, n_head: int, device: torch.device, seed: int) -> Iterator[Agreement]:
    """Every precision, each with and without padding and cache.

    Args:
        dtypes: names of torch's floating-point types.
        n_embd, n_head: width and heads of the attention module.
        device: where both paths run; the reference runs on the CPU.
        seed: decides weights, inputs and padding.
    """
    for dtype in dtypes:
        for padded in (False, True):
            for cached in (0, CACHED):
                yield from _agreements(dtype, n_embd, n_head, device, seed, padded, cached)


def _agreements(
    dtype: str, n_embd: int, n_head: int, device: torch.device, seed: int, padded: bool, cached: int
) -> Iterator[Agreement]:
    torch.manual_seed(seed)
    config = GPTConfig(block_size=cached + NEW, n_embd=n_embd, n_head=n_head)
    rounded = MultiHeadAttention(config).to(getattr(torch, dtype))
    x, direction = (torch.randn(B, cached + NEW, n_embd).to(getattr(torch, dtype)) for _ in range(2))
    padding = torch.rand(B, cached + NEW) < 0.2 if padded else None
    if padding is not None:
        padding[0, : cached + 3] = True  # the first new queries of one sequence have no key at all
    reference = attention_results(copy.deepcopy(rounded).double(), "manual", x.double(), direction, padding, cached)
    found = {
        path: attention_results(copy.deepcopy(rounded).to(device), path, x, direction, padding, cached)
        for path in PATHS
    }
    case = " and ".join([*(["padding"] if padded else []), *(["cache"] if cached else [])]) or "causal mask alone"
    for of, names in (("output", ["output"]), ("gradients", [name for name in reference if name != "output"])):
        manual, sdpa = (_worst(reference, found[path], names) for path in PATHS)
        yield Agreement(dtype, case, of, manual, sdpa, _worst(found["manual"], found["sdpa"], names))


def attention_results(
    attention: MultiHeadAttention,
    path: AttentionImpl,
    x: Tensor,
    direction: Tensor,
    padding: Tensor | None,
    cached: int,
) -> Results:
    """The output of one path and its gradients along `direction`, in float64 on the CPU.

    Args:
        attention: changed to that path.
        path: manual or sdpa.
        x: (B, S, C).
        direction: (B, S, C), the gradient of the output.
        padding: (B, S) bool, True = padding, or None.
        cached: so many of the first positions are put into a KV cache and get no gradient.
    """
    attention.config = replace(attention.config, attention_impl=path)
    weight = attention.query.weight
    x = x.to(weight)
    mask = None if padding is None else padding.to(weight.device)
    cache = None
    if cached:
        shape = (x.shape[0], attention.config.n_head, x.shape[1], attention.config.head_width)
        cache = LayerKVCache(weight.new_zeros(shape), weight.new_zeros(shape))
        with torch.no_grad():
            attention(x[:, :cached], None if mask is None else mask[:, :cached], cache)
    new = x[:, cached:].clone().requires_grad_()
    output, _ = attention(new, mask, cache)
    output.backward(direction[:, cached:].to(weight))
    assert new.grad is not None
    results = {"output": output.detach(), "x": new.grad}
    for name in ("query", "key", "value", "output"):
        layer = getattr(attention, name)
        # Together, as the gradient of the key's bias is 0 but for rounding: it moves all scores of a row alike.
        results[f"{name} projection"] = torch.cat((layer.weight.grad.flatten(), layer.bias.grad))
    return {name: value.double().cpu() for name, value in results.items()}


def _worst(expected: Results, found: Results, names: Sequence[str]) -> Difference:
    absolute = {name: (found[name] - expected[name]).abs().max().item() for name in names}
    relative = [absolute[name] / expected[name].abs().max().item() for name in names]
    return Difference(max(absolute.values()), max(relative))
