"""The logits after a growing window of tokens, as quickly as the machine gives them.

Generation asks for one position after another, so that calling modules costs a small model more than the
arithmetic does, and reading the weights costs a large one most. Here the step for one new position is laid out for
that. It calls the attention functions of model.py, and the tests hold it to the model's own forward pass.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import (
    GPT,
    DecoderBlock,
    KVCache,
    LayerKVCache,
    apply_causal_score_mask,
    attention_score_matrix,
    fused_attention,
    normalize_attention_scores,
    rotate_by_position,
    weighted_value_context,
)

PACKED_FROM = 1 << 18  # numbers in a matrix; a smaller one stays in the processor's cache, where packing gains nothing

Function = Callable[[Tensor], Tensor]
Step = Callable[[Tensor, Tensor | None], Tensor]


class NextLogits:
    """The logits of the token after a window, of which all but the last positions may be known already.

    When `quick`, holds copies of the weights as they are now: make a new one after training on.

    Args:
        model: in any mode.
        batch_size: B.
        kv_cache: keep keys and values; without it every call computes the whole window with the model itself.
        positions: most positions that a window will have; block_size when not given.
        quick: False computes every position with the model itself, and takes no memory for copies.
    """

    def __init__(
        self, model: GPT, batch_size: int, *, kv_cache: bool = True, positions: int | None = None, quick: bool = True
    ) -> None:
        self.model, self.cache = model, None
        if not kv_cache:
            return
        weight, config = model.token_embedding.weight, model.config
        length = min(config.block_size, positions or config.block_size)
        # One query against many keys is several times slower in half precision on a CPU than in float32.
        dtype = torch.float32 if weight.is_cpu and weight.dtype.itemsize < 4 else weight.dtype
        self.cache = KVCache(config, batch_size, device=weight.device, dtype=dtype, max_length=length)
        self.step: Step | None = None
        if not quick:
            return
        if weight.device.type == "cpu":
            self.step = SinglePosition(model, self.cache)
        elif weight.device.type == "cuda":
            self.step = CapturedStep(model, self.cache)

    def clear(self) -> None:
        """Forget every position."""
        if self.cache is not None:
            self.cache.clear()

    def __call__(self, window: Tensor, padding: Tensor | None = None) -> Tensor:
        """(B, T) token ids, the first of them those of the calls since `clear` -> logits (B, V).

        `padding` (B, T) is True where a row of fewer tokens is padded, at its start.
        """
        if self.cache is None:
            return self.model.next_logits(window, key_padding_mask=padding)
        new = window[:, self.cache.length :]
        if self.step is not None and new.shape[1] == 1 and self.cache.length:
            return self.step(new[:, 0], padding)
        return self.model.next_logits(new, key_padding_mask=padding, cache=self.cache)


def quick_linear(weight: Tensor, bias: Tensor | None, rows: int) -> Function:
    """x Wᵀ + b for a few rows x.

    A large matrix is laid out once as the CPU's matrix product wants it (oneDNN's blocked format), which otherwise
    happens anew in every call and, in float32, on one core: half to two thirds of the time.

    Args:
        weight: (out, in).
        bias: (out,) or None.
        rows: of x.
    """
    if weight.numel() >= PACKED_FROM and _can_be_packed(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return partial(F.linear, weight=weight, bias=bias)


def _can_be_packed(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def quick_norm(norm: nn.Module) -> Function:
    """A LayerNorm as a plain function; the identity that a post-norm model has in place of the last one as it is."""
    if not isinstance(norm, nn.LayerNorm):
        return norm
    weight, bias = (None if part is None else part.detach() for part in (norm.weight, norm.bias))
    return partial(F.layer_norm, normalized_shape=norm.normalized_shape, weight=weight, bias=bias, eps=norm.eps)


class QuickBlock(NamedTuple):
    """What one decoder block computes with, as plain functions."""

    queries_keys_values: Function
    attention_output: Function
    attention_norm: Function
    expand: Function
    activation: Function
    feed_forward_output: Function
    feed_forward_norm: Function
    scale: Tensor

    @classmethod
    def of(cls, block: DecoderBlock, rows: int) -> "QuickBlock":
        """The functions of a block, for so many rows."""

        def linear(*layers: nn.Linear) -> Function:
            bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
            return quick_linear(torch.cat([layer.weight.detach() for layer in layers]), bias, rows)

        attention, feed_forward = block.attention, block.feed_forward
        return cls(
            linear(attention.query, attention.key, attention.value),
            linear(attention.output),
            quick_norm(block.attention_add_norm.norm),
            linear(feed_forward.expand),
            partial(F.gelu, approximate=feed_forward.activation.approximate),
            linear(feed_forward.output),
            quick_norm(block.feed_forward_add_norm.norm),
            attention.scale,
        )


class SinglePosition:
    """The model's forward pass for one new position a row, through plain functions instead of modules.

    Args:
        model: its weights are taken as they are now.
        cache: the earlier positions; the new one is appended.
    """

    def __init__(self, model: GPT, cache: KVCache) -> None:
        self.config, self.cache = model.config, cache
        rows = cache.layers[0].keys.shape[0]
        self.embedding = model.token_embedding.weight.detach()
        learned = model.config.position == "learned"
        self.positions = model.position_embedding.weight.detach() if learned else None
        self.rotations = None if learned else (model.rotary_positions.cosines, model.rotary_positions.sines)
        self.blocks = [QuickBlock.of(block, rows) for block in model.blocks]  # type: ignore[arg-type]
        self.final_norm = quick_norm(model.final_norm)
        self.head = quick_linear(model.head_weight.detach()[: model.config.vocab_size], None, rows)

    def __call__(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        """(B,) token ids and the padding (B, S) of all positions -> logits (B, V)."""
        here: slice | Tensor = slice(self.cache.length, self.cache.length + 1)
        if padding is not None:
            here = (~padding).sum(dim=1) - 1  # (B,), as padding does not count
        x = F.embedding(ids, self.embedding)  # (B, C)
        if self.positions is not None:
            x = x + self.positions[here]
        rotation = None
        if self.rotations is not None:
            cosines, sines = (table[here][:, None, None] for table in self.rotations)  # (1 or B, 1, 1, D)
            rotation = (cosines, sines)
        for block, layer in zip(self.blocks, self.cache.layers, strict=True):
            if self.config.norm_placement == "pre":
                x = x + self.attend(block, layer, block.attention_norm(x), rotation, padding)
                x = x + feed_forward(block, block.feed_forward_norm(x))
            else:
                x = block.attention_norm(x + self.attend(block, layer, x, rotation, padding))
                x = block.feed_forward_norm(x + feed_forward(block, x))
        return self.head(self.final_norm(x))

    def attend(
        self,
        block: QuickBlock,
        layer: LayerKVCache,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        padding: Tensor | None,
    ) -> Tensor:
        """(B, C) -> (B, C), as `MultiHeadAttention.forward`."""
        B, H = x.shape[0], self.config.n_head
        projected = block.queries_keys_values(x).view(B, 3 * H, 1, self.config.head_width)
        if rotation is None:
            queries, keys, values = projected.chunk(3, dim=1)  # (B, H, 1, D) each
        else:
            queries, keys = rotate_by_position(projected[:, : 2 * H], rotation).chunk(2, dim=1)
            values = projected[:, 2 * H :]
        keys, values = layer.append(keys, values)  # (B, H, S, D)
        queries = queries.to(keys.dtype)
        if self.config.attention_impl == "manual":
            scores = attention_score_matrix(queries, keys, block.scale)  # (B, H, 1, S)
            scores = apply_causal_score_mask(scores, padding)
            context = weighted_value_context(normalize_attention_scores(scores, has_empty_rows=False), values)
        else:
            context = fused_attention(queries, keys, values, padding)
        return block.attention_output(context.view(B, self.config.n_embd).to(x.dtype))


def feed_forward(block: QuickBlock, x: Tensor) -> Tensor:
    """(B, C) -> (B, C), as `FeedForward.forward`."""
    return block.feed_forward_output(block.activation(block.expand(x)))


class StaticLayerKVCache(LayerKVCache):
    """The same memory as another layer's cache, written at a position that is a tensor; always as long as it can be.

    Args:
        layer: whose memory it uses.
        position: (1,) int64, where the next keys and values go.
    """

    def __init__(self, layer: LayerKVCache, position: Tensor) -> None:
        super().__init__(layer.keys, layer.values)
        self.position, self.length = position, layer.keys.shape[-2] - 1

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store one position; return all memory, in which what follows the position is not yet written."""
        self.keys.index_copy_(2, self.position, keys)
        self.values.index_copy_(2, self.position, values)
        return self.keys, self.values


class StaticStep:
    """The model's own forward pass for one new position, the same operations on the same memory in every call.

    Positions that are not yet written are masked as padding, which leaves the new one the position that it has.
    Its class `CapturedStep` records it as a CUDA graph.

    Args:
        model: in any mode.
        cache: the earlier positions; the new one is appended.
    """

    def __init__(self, model: GPT, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        B, _, S, _ = cache.layers[0].keys.shape
        self.ids = torch.zeros(B, 1, dtype=torch.int64, device=model.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.slots = torch.arange(S, device=model.device).expand(B, S)
        self.padding = torch.zeros(B, S, dtype=torch.bool, device=model.device)
        self.static_cache = copy.copy(cache)
        self.static_cache.layers = [StaticLayerKVCache(layer, self.position) for layer in cache.layers]

    def run(self) -> Tensor:
        """The logits (B, V) after `ids` at `position`."""
        nothing_there = (self.slots > self.position) | self.padding  # (B, S)
        return self.model.next_logits(self.ids, key_padding_mask=nothing_there, cache=self.static_cache)

    def __call__(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        """(B,) token ids and the padding (B, S) of all positions -> logits (B, V)."""
        self.ids.copy_(ids[:, None])
        self.padding.zero_()
        if padding is not None:
            self.padding[:, : padding.shape[1]] = padding
        self.position.fill_(self.cache.length)
        logits = self.run()
        for layer in self.cache.layers:
            layer.length += 1
        return logits


class CapturedStep(StaticStep):
    """A `StaticStep` recorded once as a CUDA graph and replayed, so that launching its kernels costs nothing."""

    def __init__(self, model: GPT, cache: KVCache) -> None:
        super().__init__(model, cache)
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> Tensor:
        """As above, recorded by the first call."""
        if self.graph is None:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # libraries set themselves up in the first runs, which may not be recorded
                for _ in range(3):
                    super().run()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = super().run()
        self.graph.replay()
        return self.logits
