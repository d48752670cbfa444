"""Autoregressive generation: one token after another, each from the model's own words so far.

`generate` yields token ids and prints nothing; text is made of them in engine/text_stream.py.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.decoding import NextLogits
from engine.evaluation import evaluation_mode
from model import GPT

NUCLEUS_AMONG = 512  # likeliest tokens in which to look for those that make up top_p

Observer = Callable[[Tensor, Tensor], None]


def generate(
    model: GPT,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    padding: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    samples: Sequence[int] = (),
    kv_cache: bool = True,
    context_shift: int = 0,
    next_logits: NextLogits | None = None,
    observe: Observer | None = None,
) -> Iterator[Tensor]:
    """Continue every row of a prompt, without dropout and without gradients.

    The model sees a window of at most block_size tokens, and the cache saves recomputing its earlier positions.
    When the window is full, its oldest `context_shift` tokens are forgotten; every position then changes, so that
    what is left is computed afresh, with a cache or without, and both give the same ids.

    Args:
        model: in any mode; its mode is restored after every token.
        prompt: (B, T) token ids, T >= 1.
        max_new_tokens: how many to yield.
        padding: (B, T) bool, True where a prompt of fewer tokens is padded, at its start; as `left_padded` makes it.
        temperature: 0 takes the likeliest token; above, the logits are divided by it.
        top_k: sample among the k likeliest tokens; 0 = all.
        top_p: sample among the smallest set of likeliest tokens with this total probability.
        min_p: sample among tokens with at least this share of the likeliest one's probability; 0 = all.
        repetition_penalty: above 1, tokens that prompt or text have already become less likely.
        seed, samples: each row draws from a random stream of its own, which depends on the seed and on the row's number
            in `samples` alone; () counts the rows from 0.
        kv_cache: keep keys and values between tokens.
        context_shift: 1 keeps the window full, at the price of computing it for every token; 0 = a quarter of
            block_size, so that three quarters are always seen.
        next_logits: made earlier for this model and as many rows, so that several calls share its preparation;
            decides on the cache, too.
        observe: told the logits (B, V), as the model gives them, and the ids (B,) that were chosen, before each yield.

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
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1 or not 0 <= min_p <= 1 or repetition_penalty < 0.01:
        raise ValueError(
            f"temperature {temperature} and top_k {top_k} must not be negative, top_p {top_p} in (0, 1], min_p {min_p} "
            f"in [0, 1], repetition_penalty {repetition_penalty} 0.01 or more"
        )
    streams = [sample_stream(seed, sample) for sample in samples or range(prompt.shape[0])]
    if next_logits is None:
        positions = prompt.shape[1] + max_new_tokens
        next_logits = NextLogits(model, prompt.shape[0], kv_cache=kv_cache, positions=positions)
    next_logits.clear()
    windows = Windows(prompt, padding, block_size, context_shift or max(1, block_size // 4))
    seen = tokens_seen(prompt, padding, model.config.vocab_size) if repetition_penalty != 1 else None
    for position in range(max_new_tokens):
        with evaluation_mode(model):
            logits = next_logits(windows.ids, windows.padding)  # (B, V)
            if not bool(torch.isfinite(torch.stack(torch.aminmax(logits))).all()):
                raise FloatingPointError(f"the logits are not finite at new token {position + 1}")
            uniforms = torch.tensor([stream.random() for stream in streams], dtype=torch.float64)
            scored = logits if seen is None else penalized(logits, seen, repetition_penalty)
            next_ids = choose_tokens(scored, uniforms, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            if observe is not None:
                observe(logits, next_ids)
            if seen is not None:
                seen.scatter_(1, next_ids[:, None], True)
            if windows.append(next_ids):
                next_logits.clear()
        yield next_ids.clone()  # outside inference mode, so that it may also go into training


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor | None]:
    """Prompts of different lengths as one batch: ids (B, T), and where they are padded (B, T), None if nowhere.

    Raises:
        ValueError: there is no prompt, or an empty one.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) == 0:
        raise ValueError("expected at least one prompt, each of at least one token")
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    padding = torch.ones_like(ids, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, max(lengths) - len(prompt) :] = torch.tensor(list(prompt))
        padding[row, max(lengths) - len(prompt) :] = False
    return ids.to(device), padding.to(device) if padding.any() else None


class Windows:
    """What the model sees of each row: its last tokens, at most `block_size`; shorter rows are padded at the start.

    Args:
        prompt, padding: as in `generate`.
        block_size: most tokens of a row.
        shift: oldest tokens to forget when a row is full; each row has its own time for it, as if it were alone.
    """

    def __init__(self, prompt: Tensor, padding: Tensor | None, block_size: int, shift: int) -> None:
        self.block_size, self.shift = block_size, shift
        self.ids = prompt[:, -block_size:]  # (B, W)
        self.padding = None if padding is None else padding[:, -block_size:]  # (B, W)

    def append(self, next_ids: Tensor) -> bool:
        """Add one token a row; whether tokens were forgotten, so that positions have changed."""
        full = self.ids.shape[1] == self.block_size
        if full and self.padding is None:
            self.ids = self.ids[:, self.shift :]
        elif full and self.padding is not None:
            # Full is a row whose first place is not padded; the others have room, once this place is gone.
            oldest = torch.arange(self.block_size, device=self.ids.device) < self.shift
            self.padding = self.padding | (~self.padding[:, :1] & oldest)
            self._drop_what_all_pad()
        self.ids = torch.cat((self.ids, next_ids[:, None]), dim=1)
        if self.padding is not None:
            self.padding = torch.cat((self.padding, torch.zeros_like(next_ids[:, None], dtype=torch.bool)), dim=1)
        return full

    def _drop_what_all_pad(self) -> None:
        if self.padding is not None:
            filled = (~self.padding).any(dim=0)
            start = int(filled.int().argmax()) if filled.any() else len(filled)
            self.ids, self.padding = self.ids[:, start:], self.padding[:, start:]


def tokens_seen(prompt: Tensor, padding: Tensor | None, vocab_size: int) -> Tensor:
    """(B, V) bool: which tokens each prompt holds."""
    seen = torch.zeros(prompt.shape[0], vocab_size + 1, dtype=torch.bool, device=prompt.device)
    return seen.scatter_(1, prompt if padding is None else prompt.masked_fill(padding, vocab_size), True)[:, :-1]


def penalized(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits (B, V) with those of `seen` tokens made smaller: divided by the penalty, or multiplied where negative.

    Source: Keskar et al. 2019, "CTRL", section 4.1.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def sample_stream(seed: int, sample: int) -> np.random.Generator:
    """The random stream of one sample: Philox keyed by seed and sample, the same on every device."""
    return np.random.Generator(np.random.Philox(key=[seed, sample]))


def choose_tokens(
    logits: Tensor,
    uniforms: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Draw one token id a row.

    Args:
        logits: (B, V), finite.
        uniforms: (B,) float64 on the CPU, each in [0, 1): the place in the cumulative distribution.
        temperature, top_k, top_p, min_p: as in `generate`, applied in this order.

    Returns:
        (B,) int64 on the logits' device.

    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration" (top_p, nucleus sampling);
    Fan et al. 2018, "Hierarchical Neural Story Generation" (top_k); Nguyen et al. 2024, "Turning Up the Heat" (min_p).
    """
    if logits.dtype.itemsize < 4:
        logits = logits.float()  # on a CPU, searching half-precision numbers takes five times as long
    if temperature == 0:
        return logits.argmax(dim=-1)
    # On the CPU, so that the same logits give the same draw on every device.
    candidates, ids = logits.cpu(), None  # (B, V)
    if 0 < top_k < candidates.shape[-1]:
        candidates, ids = candidates.topk(top_k, dim=-1)  # (B, k)
    # Subtracting the largest first keeps a tiny temperature from overflowing; one tinier still would be 0 in float32.
    scaled = (candidates - candidates.amax(dim=-1, keepdim=True)) / max(temperature, 1e-30)  # 0 at the likeliest
    probabilities = scaled.softmax(dim=-1)
    if top_p < 1:
        probabilities = _nucleus(probabilities, top_p)
    if min_p > 0:
        least = min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    # The first candidate whose cumulative probability exceeds the draw; those of probability 0 are never that.
    draws = (uniforms * cumulative[:, -1])[:, None]
    chosen = torch.searchsorted(cumulative, draws, right=True)  # (B, 1)
    return (chosen if ids is None else ids.gather(-1, chosen))[:, 0].to(logits.device)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the likeliest tokens whose total first reaches top_p; always at least one stays."""
    if probabilities.shape[-1] <= NUCLEUS_AMONG:
        return _first_to_reach(top_p, probabilities, *probabilities.sort(dim=-1, descending=True))
    # Nearly always a few tokens reach it, and to sort a whole vocabulary takes ten times as long as to find them.
    likeliest, ids = probabilities.topk(NUCLEUS_AMONG, dim=-1)
    nucleus = _first_to_reach(top_p, probabilities, likeliest, ids)
    # Each row for itself: sorting breaks ties otherwise, and what a row draws must not depend on its neighbours.
    flat = likeliest.sum(dim=-1) < top_p
    if bool(flat.any()):
        rows = probabilities[flat]
        nucleus[flat] = _first_to_reach(top_p, rows, *rows.sort(dim=-1, descending=True))
    return nucleus


def _first_to_reach(top_p: float, probabilities: Tensor, ordered: Tensor, ids: Tensor) -> Tensor:
    reached_before = ordered.cumsum(dim=-1) - ordered >= top_p
    return torch.zeros_like(probabilities).scatter(-1, ids, ordered.masked_fill(reached_before, 0.0))
