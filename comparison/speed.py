"""Which is quicker here, manual or fused attention, and which takes less memory? By length and precision.

Every figure is of one attention module and of always as many tokens, so that longer means fewer sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from comparison.agreement import PATHS
from comparison.processes import Case, CaseCall, Measured, measure_in_turn
from engine.device import autocast, keep_freed_memory
from model import AttentionImpl, GPTConfig, MultiHeadAttention

FORWARD, STEP = "forward", "forward and backward"
KERNEL_PREFIX = "aten::_scaled_dot_product_"


@dataclass(frozen=True)
class Work:
    """What is measured at every length and precision.

    Attributes:
        n_embd, n_head: width and heads of the attention module.
        tokens: in all sequences of a batch together, at least one sequence.
        device: cpu, cuda, cuda:N or mps.
    """

    n_embd: int
    n_head: int
    tokens: int
    device: str


@dataclass(frozen=True)
class Pair:
    """Both paths at one length and precision."""

    dtype: str
    length: int
    manual: Measured
    sdpa: Measured

    @property
    def quicker(self) -> str:
        """The path whose slowest forward and backward pass is quicker than the other's quickest; "" when neither's is.

        A path that failed leaves the other one as the only one, which is no matter of speed.
        """
        if self.manual.failed or self.sdpa.failed:
            return ""
        (manual_best, manual_worst), (sdpa_best, sdpa_worst) = self.manual.timing.spread, self.sdpa.timing.spread
        if manual_worst < sdpa_best:
            return "manual"
        return "SDPA" if sdpa_worst < manual_best else ""

    def as_plain(self) -> dict[str, Any]:
        """As compare.json holds it; seconds and megabytes."""
        paths = {name: _plain(path) for name, path in (("manual", self.manual), ("sdpa", self.sdpa))}
        return {"dtype": self.dtype, "length": self.length, **paths, "quicker": self.quicker}


def _plain(path: Measured) -> dict[str, Any]:
    def seconds(name: str) -> dict[str, float] | None:
        timing = path.timings.get(name)
        return None if timing is None else {"median": timing.median, "min": timing.spread[0], "max": timing.spread[1]}

    kernel = path.facts.get("kernel", "")
    return {
        "forward": seconds(FORWARD), "step": seconds(STEP), "megabytes": path.own_megabytes, "kernel": kernel,
        "failed": path.failed,
    }  # fmt: skip


def attention_case(
    path: AttentionImpl, dtype: str, length: int, n_embd: int, n_head: int, tokens: int, device: str
) -> Case:
    """One attention module with random weights and inputs: a forward pass, and one with the backward pass."""
    keep_freed_memory()
    place, precision = torch.device(device), getattr(torch, dtype)
    config = GPTConfig(block_size=length, n_embd=n_embd, n_head=n_head, attention_impl=path)
    # Weights and inputs, as in training; what is narrower is autocast's.
    stored = torch.float64 if precision == torch.float64 else torch.float32
    attention = MultiHeadAttention(config).to(place, stored)

    def forward(x: Tensor) -> Tensor:
        with autocast(place, precision):
            output, _ = attention(x)
        return output.to(stored)

    def forward_alone() -> None:
        with torch.no_grad():
            forward(x)

    def step() -> None:
        forward(x).square().mean().backward()  # type: ignore[no-untyped-call]
        attention.zero_grad(set_to_none=True)

    x = torch.randn(1, min(8, length), n_embd, device=place, dtype=stored)
    step()  # loads the libraries, whose memory is not the attention's
    x = torch.randn(max(1, tokens // length), length, n_embd, device=place, dtype=stored)
    return Case({FORWARD: forward_alone, STEP: step}, place.type, lambda: {"kernel": kernel_of(step)})


def kernel_of(step: Callable[[], object]) -> str:
    """What `scaled_dot_product_attention` chose to run in a step, by its name in PyTorch; "" where it is not called."""
    with torch.profiler.profile() as profile:
        step()
    names = {event.name for event in profile.events() or () if event.name.startswith(KERNEL_PREFIX)}
    kernels = sorted(name.removeprefix(KERNEL_PREFIX) for name in names if not name.endswith("_backward"))
    return ", ".join(kernels).replace("_", " ")


def measure(lengths: Sequence[int], dtypes: Sequence[str], work: Work, rounds: int) -> Iterator[Pair]:
    """Both paths in turn at every precision and length, each in a process of its own."""
    for dtype in dtypes:
        for length in lengths:
            arguments = {"dtype": dtype, "length": length, **vars(work)}
            calls = {
                str(path): CaseCall("comparison.speed:attention_case", {"path": path, **arguments}) for path in PATHS
            }
            yield Pair(dtype, length, **measure_in_turn(calls, rounds=rounds))


def conclusions(pairs: Sequence[Pair]) -> list[str]:
    """What was measured, in a sentence a precision; nothing is said of lengths between or beyond."""
    sentences = []
    for dtype, group in groupby(pairs, key=lambda pair: pair.dtype):
        of_dtype = list(group)
        stretches = [(what, [pair.length for pair in stretch]) for what, stretch in groupby(of_dtype, key=_outcome)]
        told = [f"{what} at T = {_lengths(lengths)}" for what, lengths in stretches]
        both = [pair for pair in of_dtype if pair.manual.own_megabytes and pair.sdpa.own_megabytes]
        if both:
            longest = max(both, key=lambda pair: pair.length)
            told.append(
                f"at T = {longest.length:,} manual takes {longest.manual.own_megabytes:,.0f} MB "
                f"and SDPA {longest.sdpa.own_megabytes:,.0f} MB"
            )
        sentences.append(f"in {dtype}, forward and backward: " + "; ".join(told))
    return sentences


def _outcome(pair: Pair) -> str:
    failed = [name for name, path in (("manual", pair.manual), ("SDPA", pair.sdpa)) if path.failed]
    if failed:
        return f"no {' and no '.join(failed)} for lack of memory"
    return f"{pair.quicker} is quicker" if pair.quicker else "neither is clearly quicker"


def _lengths(lengths: Sequence[int]) -> str:
    return f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
