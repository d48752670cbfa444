"""The GPT: attention, Add & Norm, decoder blocks and the language-model head, from token ids to logits.

Knows PyTorch and nothing else of this repository, so it can be copied out and read alone. It knows
nothing of text, files, training loops or sampling; those call it.

Shapes: B batch, T query positions, S key positions (S >= T with a KV cache), C = n_embd, H = n_head,
D = C // H the head width, V = vocab_size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["gelu", "gelu_tanh"]
AttentionImpl = Literal["manual", "sdpa"]
NormPlacement = Literal["post", "pre"]
PositionKind = Literal["learned", "rotary"]

IGNORED_TARGET = -1  # a target with this id takes no part in the loss
LONGEST_CONTEXT = 1 << 20
LOGITS_AT_ONCE = 1 << 25  # a loss over more of them than this is taken in chunks


@dataclass(frozen=True)
class GPTConfig:
    """The architecture of one GPT.

    `vocab_size` counts the ids that the tokenizer has; `vocab_padding_multiple` rounds the rows of the
    embedding and the head up to a multiple (64 suits GPUs). The extra rows can never be predicted.

    Raises:
        ValueError: a size is out of range, a choice is unknown, or n_embd is not divisible by n_head.
    """

    block_size: int = 256
    vocab_size: int = 50257
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384
    dropout: float = 0.0
    bias: bool = True
    attention_impl: AttentionImpl = "manual"
    norm_placement: NormPlacement = "post"
    position: PositionKind = "learned"
    activation: Activation = "gelu"
    tied_head: bool = True
    vocab_padding_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "vocab_padding_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 or more")
        if self.block_size > LONGEST_CONTEXT:
            raise ValueError(f"block_size = {self.block_size}: expected at most {LONGEST_CONTEXT}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout = {self.dropout}: expected 0 or more and less than 1")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd = {self.n_embd} is not divisible by n_head = {self.n_head}: every head needs the same width"
            )
        if self.position == "rotary" and self.head_width % 2:
            raise ValueError(
                f"position = rotary turns pairs of numbers, so n_embd / n_head must be even: "
                f"{self.n_embd} / {self.n_head} = {self.head_width}"
            )
        for name, choices in (
            ("attention_impl", ("manual", "sdpa")),
            ("norm_placement", ("post", "pre")),
            ("position", ("learned", "rotary")),
            ("activation", ("gelu", "gelu_tanh")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} = {getattr(self, name)!r}: expected {' or '.join(choices)}")

    @property
    def head_width(self) -> int:
        """D, the width of one head."""
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head: vocab_size rounded up to vocab_padding_multiple."""
        return math.ceil(self.vocab_size / self.vocab_padding_multiple) * self.vocab_padding_multiple

    @property
    def parameter_count(self) -> int:
        """Trained numbers in a model of this architecture, a tied head counted once."""
        C, norm = self.n_embd, self.n_embd * (1 + self.bias)
        block = 12 * C * C + 9 * C * self.bias + 2 * norm
        embeddings = self.padded_vocab_size * C * (1 if self.tied_head else 2)
        positions = self.block_size * C if self.position == "learned" else 0
        return self.n_layer * block + embeddings + positions + (norm if self.norm_placement == "pre" else 0)

    @property
    def operations_per_token(self) -> int:
        """Floating-point operations of a forward and backward pass for one token of a full context.

        Source: Chowdhery et al. 2022, "PaLM", appendix B: 6 for each parameter in a matrix product, and attention's.
        """
        looked_up = self.block_size * self.n_embd if self.position == "learned" else 0
        return 6 * (self.parameter_count - looked_up) + 12 * self.n_layer * self.n_embd * self.block_size


# --- Attention, step by step ------------------------------------------------------------------------


def attention_score_matrix(queries: Tensor, keys: Tensor, scale: Tensor | float | None = None) -> Tensor:
    """How well each query matches each key: Q Kᵀ, divided by `scale` when one is given.

    Args:
        queries: (..., T, D).
        keys: (..., S, D).
        scale: sqrt(D), the head width's root (never the model width's): independent components of
            variance 1 give dot products of variance D, and this brings it back to 1.

    Returns:
        Scores (..., T, S).

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1.
    """
    # Dividing the queries is the same product with fewer divisions, and keeps float16 scores from overflowing.
    scaled_queries = queries if scale is None else queries / scale
    return scaled_queries @ keys.transpose(-2, -1)


def blocked_keys(B: int, T: int, S: int, device: torch.device, key_padding_mask: Tensor | None = None) -> Tensor:
    """Which key each query may not see: True = blocked. The one place that knows both rules.

    Queries are aligned to the END of the keys: query t may see keys 0 ... S-T+t, so that T new tokens
    after a cache of S-T tokens see all of it.

    Args:
        B: sequences.
        T: query positions.
        S: key positions.
        device: where the mask is made.
        key_padding_mask: (B, S) bool, True = this key is padding = blocked (nn.MultiheadAttention's
            convention; SDPA's boolean mask is the other way round).

    Returns:
        (T, S), or (B, 1, T, S) with a padding mask.

    Raises:
        ValueError: more queries than keys, or a padding mask of another shape.
        TypeError: a padding mask that is not boolean.
    """
    if T > S:
        raise ValueError(f"{T} queries but only {S} keys: queries are aligned to the end of the keys")
    blocked = torch.ones(T, S, dtype=torch.bool, device=device).triu(diagonal=S - T + 1)
    if key_padding_mask is None:
        return blocked
    if key_padding_mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask is {key_padding_mask.dtype}: expected torch.bool, True = padding")
    if key_padding_mask.shape != (B, S):
        raise ValueError(f"key_padding_mask has shape {tuple(key_padding_mask.shape)}: expected (B, S) = {(B, S)}")
    return blocked | key_padding_mask[:, None, None, :]


def apply_causal_score_mask(scores: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Scores with -inf wherever a query may not look: at later positions and at padding.

    True -inf, so that the weight is exactly 0 in every dtype; a large negative number only approximates
    that, and overflows in float16.

    Args:
        scores: (..., T, S), finite; with a padding mask (B, H, T, S) or (B, T, S).
        key_padding_mask: (B, S) bool, True = padding = blocked.

    Returns:
        Masked scores, same shape.

    Raises:
        ValueError: T > S, or a padding mask whose shape does not fit the scores.
        TypeError: a padding mask that is not boolean.
    """
    T, S = scores.shape[-2:]
    if key_padding_mask is None and T == 1:
        return scores  # the newest query may see every key
    blocked = blocked_keys(scores.shape[0], T, S, scores.device, key_padding_mask)
    if scores.dim() == 3 and key_padding_mask is not None:
        blocked = blocked.squeeze(1)  # (B, T, S)
    # Added, not filled in: the backward pass then has nothing to do, as a weight of 0 already has gradient 0.
    return scores + torch.zeros_like(blocked, dtype=scores.dtype).masked_fill(blocked, -torch.inf)


def normalize_attention_scores(
    scores: Tensor, dropout: Callable[[Tensor], Tensor] | None = None, *, has_empty_rows: bool = True
) -> Tensor:
    """Attention weights: softmax over the keys, then dropout.

    The softmax of half-precision scores is taken in float32. A row in which no key is allowed (all -inf)
    gets weights 0 and gradient 0; a plain softmax gives NaN there, and a finite mask value gives uniform
    weights on keys that nobody may see.

    Args:
        scores: (..., T, S), -inf = blocked.
        dropout: applied to the weights; rows then need not sum to 1.
        has_empty_rows: False when the caller knows that every row has an allowed key, as the causal mask
            alone guarantees; it saves three passes over the scores.

    Returns:
        Weights (..., T, S) in the dtype of the scores.
    """
    # The CPU's kernel computes in float32 inside whatever it is given, and converting first costs two more passes.
    safe_dtype = torch.float32 if scores.dtype.itemsize < 4 and not scores.is_cpu else scores.dtype
    if has_empty_rows:
        empty_rows = (scores == -torch.inf).all(dim=-1, keepdim=True)  # (..., T, 1)
        weights = scores.masked_fill(empty_rows, 0.0).softmax(dim=-1, dtype=safe_dtype).masked_fill(empty_rows, 0.0)
    else:
        weights = scores.softmax(dim=-1, dtype=safe_dtype)
    weights = weights.to(scores.dtype)
    return weights if dropout is None else dropout(weights)


def weighted_value_context(weights: Tensor, values: Tensor) -> Tensor:
    """The context of each query: the values, weighted and added up, A V.

    Args:
        weights: (..., T, S).
        values: (..., S, D).

    Returns:
        Context (..., T, D).
    """
    return weights @ values


def fused_attention(
    queries: Tensor, keys: Tensor, values: Tensor, key_padding_mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """The four steps above in one call of PyTorch's `scaled_dot_product_attention`, with the same results.

    Its `is_causal` aligns queries to the START of the keys, so it serves only T == S; it ignores or refuses
    a mask beside `is_causal`, so never both; and it looks at no module's eval state, so `dropout_p` must
    be 0.0 then.

    Args:
        queries: (B, H, T, D).
        keys, values: (B, H, S, D).
        key_padding_mask: (B, S) bool, True = padding = blocked.
        dropout_p: probability of dropping an attention weight.

    Returns:
        Context (B, H, T, D).
    """
    B, T, S = queries.shape[0], queries.shape[-2], keys.shape[-2]
    if key_padding_mask is None and (T == S or T == 1):
        return F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout_p, is_causal=T == S)
    blocked = blocked_keys(B, T, S, queries.device, key_padding_mask)
    if key_padding_mask is None:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=~blocked, dropout_p=dropout_p)
    # What a backend returns for a row without any key has changed between versions: let it see all, then zero it.
    empty_rows = blocked.all(dim=-1, keepdim=True)  # (B, 1, T, 1)
    context = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=~blocked | empty_rows, dropout_p=dropout_p
    )
    return context.masked_fill(empty_rows, 0.0)


class LayerKVCache:
    """One layer's part of a `KVCache`."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys  # (B, H, max_length, D)
        self.values = values  # (B, H, max_length, D)
        self.length = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store T new positions, (B, H, T, D) each; return all S so far, (B, H, S, D) each, in the cache's dtype.

        Raises:
            ValueError: the cache has no room for T more positions.
        """
        end = self.length + keys.shape[-2]
        if end > self.keys.shape[-2]:
            raise ValueError(f"the KV cache holds {self.keys.shape[-2]} positions, {end} are needed")
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class KVCache:
    """Keys and values of the positions seen so far, preallocated for generation.

    An argument of `GPT.forward`, never a part of the module: dropping it leaves no state behind.

    Args:
        config: of the model that will use it.
        batch_size: B.
        device: that of the model.
        dtype: of what is stored; a wider one than the model's is brought back to the model's when it is used.
        max_length: positions to make room for; block_size when not given.
    """

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_length: int | None = None,
    ) -> None:
        length = config.block_size if max_length is None else max_length
        shape = (batch_size, config.n_head, length, config.head_width)

        def memory() -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        self.layers = [LayerKVCache(memory(), memory()) for _ in range(config.n_layer)]

    @property
    def length(self) -> int:
        """Positions stored so far."""
        return self.layers[0].length

    def clear(self) -> None:
        """Forget every position; the memory stays allocated."""
        for layer in self.layers:
            layer.length = 0


class ExactConstants(nn.Module):
    """A module whose buffers are constants of the architecture, recomputed whenever the module is cast.

    Casting a module to bfloat16 would also round its buffers for good: the scale sqrt(32) would become
    5.65625 and the manual path would drift away from SDPA. They stay in float32, or float64 in a float64 module.
    """

    def constants(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The buffers by name, computed from the architecture."""
        raise NotImplementedError

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]  # nn.Module's hook, untyped there
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in list(self.named_buffers(recurse=False)):
            dtype = torch.float64 if buffer.dtype == torch.float64 else torch.float32
            setattr(self, name, self.constants(dtype)[name].to(buffer.device))
        return self


class RotaryPositions(ExactConstants):
    """Cosines and sines that turn queries and keys by angles proportional to their positions.

    Source: Su et al. 2021, "RoFormer", section 3.2.2; base 10000, first half paired with second half.
    """

    cosines: Tensor  # (block_size, D), the same for both halves
    sines: Tensor  # (block_size, D), negative in the first half

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        for name, table in self.constants(torch.float32).items():
            self.register_buffer(name, table, persistent=False)

    def constants(self, dtype: torch.dtype) -> dict[str, Tensor]:
        D = self.config.head_width
        frequencies = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)  # (D/2,)
        angles = torch.outer(torch.arange(self.config.block_size, dtype=torch.float64), frequencies)
        sines = angles.sin()
        return {
            "cosines": angles.cos().repeat(1, 2).to(dtype),
            "sines": torch.cat((-sines, sines), dim=-1).to(dtype),
        }

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (T,) or (B, T) -> cosines and sines (T, D) or (B, 1, T, D), to fit (B, H, T, D)."""
        cosines, sines = self.cosines[positions], self.sines[positions]
        return (cosines, sines) if positions.dim() == 1 else (cosines.unsqueeze(1), sines.unsqueeze(1))


def rotate_by_position(vectors: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of numbers of queries or keys (B, H, T, D) by its position's angle; same shape and dtype.

    The pair (a, b), one from each half, becomes (a cos - b sin, b cos + a sin).
    """
    cosines, sines = rotation
    wide = vectors.to(cosines.dtype)
    partners = wide.roll(wide.shape[-1] // 2, dims=-1)  # the halves changed over
    return torch.addcmul(wide * cosines, partners, sines).to(vectors.dtype)


class MultiHeadAttention(ExactConstants):
    """Causal multi-head self-attention with separate query, key, value and output projections.

    `scale` is sqrt(D), a buffer: saved and moved with the module, never trained.

    Source: Vaswani et al. 2017, section 3.2.2.
    """

    scale: Tensor  # ()

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.key = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.value = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.output = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attention_dropout = nn.Dropout(config.dropout)
        self.register_buffer("scale", self.constants(torch.float32)["scale"])

    def constants(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"scale": torch.tensor(math.sqrt(self.config.head_width), dtype=dtype)}

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the three projections make of x (B, T, C), (B, T, C) each: one product with their stacked weights."""
        layers = (self.query, self.key, self.value)
        weight = torch.cat([layer.weight for layer in layers])  # (3C, C)
        bias = torch.cat([layer.bias for layer in layers]) if self.config.bias else None  # (3C,)
        return F.linear(x, weight, bias).chunk(3, dim=-1)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, H, T, D). View first, transpose after: the other order would mix positions."""
        B, T, _ = x.shape
        return x.view(B, T, self.config.n_head, self.config.head_width).transpose(1, 2)

    def merge_heads(self, context: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, T, C), the exact reverse of `split_heads`."""
        B, _, T, _ = context.shape
        return context.transpose(1, 2).contiguous().view(B, T, self.config.n_embd)

    def manual_attention(
        self, queries: Tensor, keys: Tensor, values: Tensor, key_padding_mask: Tensor | None, return_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The four functions, in order: context (B, H, T, D), and the weights before dropout when asked for."""
        scores = attention_score_matrix(queries, keys, self.scale)  # (B, H, T, S)
        scores = apply_causal_score_mask(scores, key_padding_mask)  # (B, H, T, S)
        padded = key_padding_mask is not None
        weights = normalize_attention_scores(scores, self.attention_dropout, has_empty_rows=padded)  # (B, H, T, S)
        context = weighted_value_context(weights, values)  # (B, H, T, D)
        return context, normalize_attention_scores(scores, has_empty_rows=padded) if return_weights else None

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        cache: LayerKVCache | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        return_attention_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Let every position gather what it needs from the positions up to itself.

        Args:
            x: (B, T, C).
            key_padding_mask: (B, S) bool, True = padding = blocked.
            cache: this layer's earlier keys and values; the new ones are appended.
            rotation: from RotaryPositions, when positions are rotary.
            return_attention_weights: also return the weights before dropout; takes the manual path
                whatever `attention_impl` says.

        Returns:
            (B, T, C), and the weights (B, H, T, S) when asked for, else None.
        """
        queries, keys, values = map(self.split_heads, self.queries_keys_values(x))  # (B, H, T, D) each
        if rotation is not None:
            queries, keys = rotate_by_position(queries, rotation), rotate_by_position(keys, rotation)
        if cache is not None:
            keys, values = (stored.to(x.dtype) for stored in cache.append(keys, values))  # (B, H, S, D)
        weights = None
        if self.config.attention_impl == "manual" or return_attention_weights:
            context, weights = self.manual_attention(queries, keys, values, key_padding_mask, return_attention_weights)
        else:
            dropout_p = self.config.dropout if self.training else 0.0
            context = fused_attention(queries, keys, values, key_padding_mask, dropout_p)
        return self.output(self.merge_heads(context)), weights


# --- The decoder around it --------------------------------------------------------------------------


class AddNorm(nn.Module):
    """A residual connection and a LayerNorm around a sublayer.

    `post` is LayerNorm(x + dropout(sublayer(x))), as in the original Transformer (Vaswani et al. 2017,
    section 5.4); `pre` is x + dropout(sublayer(LayerNorm(x))), as in GPT-2 (Radford et al. 2019, section 2.3).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_placement = config.norm_placement
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        if self.norm_placement == "pre":
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))


class FeedForward(nn.Module):
    """Two projections with a GELU between, four times as wide inside.

    `gelu_tanh` is GPT-2's approximation of GELU; the exact one takes a third of its time on a CPU.

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.activation = nn.GELU(approximate="tanh" if config.activation == "gelu_tanh" else "none")
        self.output = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.output(self.activation(self.expand(x)))


class DecoderBlock(nn.Module):
    """Masked self-attention, then feed-forward, each inside an Add & Norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(config)
        self.attention_add_norm = AddNorm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_add_norm = AddNorm(config)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        cache: LayerKVCache | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        return_attention_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Arguments and results as `MultiHeadAttention.forward`."""
        weights: Tensor | None = None

        def self_attention(hidden: Tensor) -> Tensor:
            nonlocal weights
            attended, weights = self.attention(hidden, key_padding_mask, cache, rotation, return_attention_weights)
            return attended

        x = self.attention_add_norm(x, self_attention)
        x = self.feed_forward_add_norm(x, self.feed_forward)
        return x, weights


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of logits (N, V) at targets (N,), in float32 or wider; () in nats per token."""
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    return F.cross_entropy(logits, targets, ignore_index=IGNORED_TARGET)


def cross_entropy_of_chunk(
    states: Tensor, head: Tensor, targets: Tensor, vocab_size: int, with_gradients: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sum of some positions' cross-entropies, and its gradients, whose logits nobody sees.

    Args:
        states: (n, C) hidden states.
        head: (padded vocabulary, C), of the same type.
        targets: (n,).
        vocab_size: ids from here on are padding.
        with_gradients: otherwise there are none.

    Returns:
        The sum (), in float32 or wider; its gradients with respect to states (n, C) and head.
    """
    scored, chosen = (targets != IGNORED_TARGET)[:, None], targets[:, None].clamp(min=0)  # (n, 1), (n, 1)
    logits = states @ head.T  # (n, padded vocabulary)
    logits[:, vocab_size:] = -torch.inf
    wide_dtype = torch.float32 if logits.dtype.itemsize < 4 else logits.dtype
    log_probabilities = logits.log_softmax(dim=-1, dtype=wide_dtype)
    loss = -log_probabilities.gather(1, chosen).masked_fill(~scored, 0.0).sum()
    if not with_gradients:
        return loss, None, None
    minus_one = torch.full_like(chosen, -1, dtype=wide_dtype)
    d_logits = log_probabilities.exp_().scatter_add_(1, chosen, minus_one).to(states.dtype)
    del logits, log_probabilities  # no one needs them while the products below take their place
    d_logits.index_fill_(0, (~scored[:, 0]).nonzero()[:, 0], 0.0)
    return loss, d_logits @ head, d_logits.T @ states


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of the head's logits, a chunk of positions at a time, so that they never exist all at once.

    A chunk's logits are made, turned into their own gradient and dropped in the forward pass already; the
    backward pass only scales what was collected.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, with_gradients: bool
    ) -> Tensor:
        """(N, C) hidden states, (padded vocabulary, C) weight and (N,) targets -> the mean loss ()."""
        device = hidden.device.type
        autocasts = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
        dtype = torch.get_autocast_dtype(device) if autocasts else hidden.dtype
        head = weight.to(dtype)
        total = torch.zeros((), dtype=torch.float32 if dtype.itemsize < 4 else dtype, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if with_gradients else None
        d_weight = None
        chunks = math.ceil(len(targets) * weight.shape[0] / LOGITS_AT_ONCE)
        chunk = math.ceil(len(targets) / chunks)
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            loss, d_states, d_head = cross_entropy_of_chunk(
                hidden[rows].to(dtype), head, targets[rows], vocab_size, with_gradients
            )
            total += loss
            if d_hidden is not None and d_states is not None and d_head is not None:
                d_hidden[rows] = d_states
                d_weight = d_head.to(weight.dtype) if d_weight is None else d_weight.add_(d_head)
            del d_states, d_head
        count = (targets != IGNORED_TARGET).sum()
        ctx.gradients = d_hidden, d_weight, count
        return total / count

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Gradients of hidden states and weight."""
        d_hidden, d_weight, count = ctx.gradients
        ctx.gradients = None  # a second backward pass would find them scaled
        return d_hidden.mul_(d_loss / count), d_weight.mul_(d_loss / count), None, None, None


class GPT(nn.Module):
    """A decoder-only Transformer language model.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.padded_vocab_size, config.n_embd)
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.block_size, config.n_embd)
        else:
            self.rotary_positions = RotaryPositions(config)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.n_layer))
        # Post-norm blocks already end in a LayerNorm.
        pre_norm = config.norm_placement == "pre"
        self.final_norm = nn.LayerNorm(config.n_embd, bias=config.bias) if pre_norm else nn.Identity()
        if not config.tied_head:
            self.head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.initialize()

    def initialize(self) -> None:
        """GPT-2's initialisation: normal(0, 0.02), zero biases, residual outputs smaller by sqrt(2 n_layer)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                writes_residual = name.endswith((".attention.output", ".feed_forward.output"))
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if writes_residual else 0.02
                nn.init.normal_(module.weight, mean=0.0, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.token_embedding.weight.device

    @property
    def head_weight(self) -> Tensor:
        """(padded vocabulary, C): the token embedding itself when the head is tied (one storage, counted once)."""
        return self.token_embedding.weight if self.config.tied_head else self.head.weight

    def parameter_count(self) -> int:
        """Trained numbers in the model, a tied head counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def positions_of(self, T: int, cached: int, key_padding_mask: Tensor | None) -> Tensor:
        """Positions (T,) of the new tokens; (B, T) with padding, which does not count."""
        if key_padding_mask is None:
            return torch.arange(cached, cached + T, device=self.device)
        return ((~key_padding_mask).cumsum(dim=1) - 1).clamp(min=0)[:, -T:]

    def hidden_states(
        self,
        idx: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cache: KVCache | None = None,
        attention_weights: list[Tensor] | None = None,
    ) -> Tensor:
        """What the last block makes of the tokens: (B, T) ids -> (B, T, C).

        Args:
            idx: (B, T) token ids.
            key_padding_mask: (B, S) bool over cached and new positions, True = padding.
            cache: earlier keys and values; the new ones are appended.
            attention_weights: a list to which each layer's weights (B, H, T, S) are added.

        Raises:
            ValueError: cached and new positions together are longer than block_size, or there are none.
        """
        T, cached = idx.shape[1], 0 if cache is None else cache.length
        if not 1 <= cached + T <= self.config.block_size or T == 0:
            raise ValueError(f"{cached + T} positions: expected 1 to block_size = {self.config.block_size}")
        positions = self.positions_of(T, cached, key_padding_mask)  # (T,) or (B, T)
        x = self.token_embedding(idx)  # (B, T, C)
        rotation = None
        if self.config.position == "learned":
            x = x + self.position_embedding(positions)  # (B, T, C)
        else:
            rotation = self.rotary_positions(positions)
        x = self.embedding_dropout(x)
        for layer, block in enumerate(self.blocks):
            layer_cache = None if cache is None else cache.layers[layer]
            x, weights = block(x, key_padding_mask, layer_cache, rotation, attention_weights is not None)
            if attention_weights is not None:
                attention_weights.append(weights)
        return self.final_norm(x)

    def padded_logits(self, hidden: Tensor) -> Tensor:
        """Next-token scores (..., C) -> (..., padded vocabulary), -inf at ids that no token has."""
        logits = F.linear(hidden, self.head_weight)
        if self.config.padded_vocab_size > self.config.vocab_size:
            logits[..., self.config.vocab_size :] = -torch.inf
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token scores: (..., C) -> (..., V)."""
        return self.padded_logits(hidden)[..., : self.config.vocab_size]

    def next_logits(
        self, idx: Tensor, *, key_padding_mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Scores of the token after the last one: (B, T) ids -> (B, V); arguments and errors as `hidden_states`."""
        return self.logits(self.hidden_states(idx, key_padding_mask=key_padding_mask, cache=cache)[:, -1])

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy (B, T, C), (B, T) -> () in nats per token, without holding all the logits."""
        hidden, targets = hidden.flatten(0, 1), targets.flatten()  # (N, C), (N,)
        if len(targets) * self.config.padded_vocab_size <= LOGITS_AT_ONCE:
            return cross_entropy(self.padded_logits(hidden), targets)
        weight = self.head_weight
        with_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        apply: Callable[..., Tensor] = ChunkedCrossEntropy.apply
        return apply(hidden, weight, targets, self.config.vocab_size, with_gradients)

    @overload
    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cache: KVCache | None = None,
        return_logits: Literal[True] = True,
        return_attention_weights: Literal[False] = False,
    ) -> tuple[Tensor, Tensor | None]: ...

    @overload
    def forward(
        self,
        idx: Tensor,
        targets: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cache: KVCache | None = None,
        return_logits: Literal[False],
        return_attention_weights: Literal[False] = False,
    ) -> tuple[None, Tensor]: ...

    @overload
    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cache: KVCache | None = None,
        return_logits: Literal[True] = True,
        return_attention_weights: Literal[True],
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]: ...

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cache: KVCache | None = None,
        return_logits: bool = True,
        return_attention_weights: bool = False,
    ) -> tuple[Tensor | None, Tensor | None] | tuple[Tensor | None, Tensor | None, list[Tensor]]:
        """Scores for every next token, and how well they predict `targets` (teacher forcing).

        Args:
            idx: (B, T) token ids.
            targets: (B, T), the token that follows each of idx; IGNORED_TARGET takes no part.
            key_padding_mask: (B, S) bool over cached and new positions, True = padding.
            cache: earlier keys and values; the new ones are appended.
            return_logits: False gives None in their place, and spares the memory that they take.
            return_attention_weights: also return each layer's weights, before dropout; takes the manual path.

        Returns:
            Logits (B, T, V); the mean cross-entropy in nats per token, or None without targets; and, when
            asked for, a list of n_layer tensors (B, H, T, S).

        Raises:
            ValueError: cached and new positions together are longer than block_size, or there are none.
        """
        attention_weights: list[Tensor] | None = [] if return_attention_weights else None
        hidden = self.hidden_states(
            idx, key_padding_mask=key_padding_mask, cache=cache, attention_weights=attention_weights
        )
        logits = loss = None
        if return_logits:
            padded = self.padded_logits(hidden)  # (B, T, padded vocabulary)
            logits = padded[..., : self.config.vocab_size]  # (B, T, V)
            loss = None if targets is None else cross_entropy(padded.flatten(0, 1), targets.flatten())
        elif targets is not None:
            loss = self.loss(hidden, targets)
        return (logits, loss) if attention_weights is None else (logits, loss, attention_weights)

    def crop_block_size(self, block_size: int) -> None:
        """Shorten the context in place, keeping the first positions.

        Raises:
            ValueError: block_size is not between 1 and the present one.
        """
        if not 1 <= block_size <= self.config.block_size:
            raise ValueError(f"block_size = {block_size}: expected 1 to {self.config.block_size}")
        self.config = replace(self.config, block_size=block_size)
        if self.config.position == "learned":
            rows = self.position_embedding.weight.detach()[:block_size].clone()
            self.position_embedding = nn.Embedding(block_size, self.config.n_embd, _weight=rows)
        else:
            self.rotary_positions = RotaryPositions(self.config).to(self.token_embedding.weight)
