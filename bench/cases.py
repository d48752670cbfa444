"""What is timed in processes of its own: the same work by this repository and by its peers.

Every whole model has GPT-2's architecture (pre-norm, learned positions, biases, the tanh form of GELU), the same sizes,
the same batch and the same optimizer. The peers come as their users get them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comparison.processes import Case, CaseCall, Measured, measure_in_turn
from engine.device import add_up_in_order, autocast, keep_freed_memory
from engine.generation import generate
from model import GPT, GPTConfig

Run = Callable[[], object]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of a batch."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    batch_size: int

    def tokens(self) -> Tensor:
        """Random ids (B, T)."""
        torch.manual_seed(0)
        return torch.randint(0, self.vocab_size, (self.batch_size, self.block_size), device=DEVICE)


SMALL = Shape(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65, batch_size=12)
GPT2 = Shape(n_layer=12, n_head=12, n_embd=768, block_size=256, vocab_size=50257, batch_size=4)


def our_config(shape: Shape, path: str, **changes: object) -> GPTConfig:
    """The architecture of this repository's model."""
    sizes = {name: getattr(shape, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    architecture = {"norm_placement": "pre", "activation": "gelu_tanh", "attention_impl": path}
    return GPTConfig(**sizes | architecture | changes)


def ours(shape: Shape, path: str, **changes: object) -> GPT:
    """This repository's model."""
    return GPT(our_config(shape, path, **changes)).to(DEVICE)


def transformers_gpt2(shape: Shape, attention: str = "sdpa") -> Any:
    """Hugging Face's GPT-2; its own default is sdpa."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.block_size,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention,
    )
    return transformers.GPT2LMHeadModel(config).to(DEVICE)


def training_step(model: torch.nn.Module, loss_of: Callable[[], Tensor], dtype: torch.dtype) -> Run:
    """Forward, backward, clipping and AdamW."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with autocast(DEVICE, dtype):
            loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(shape: Shape, dtype: torch.dtype, path: str = "manual", compiled: bool = False, **changes: object) -> Run:
    """As train.py runs it."""
    keep_freed_memory()
    model, tokens = ours(shape, path, **changes), shape.tokens()
    if compiled:
        add_up_in_order()
    forward = torch.compile(model) if compiled else model
    return training_step(model, lambda: forward(tokens, tokens, return_logits=False)[1], dtype)


def transformers_step(shape: Shape, dtype: torch.dtype, attention: str = "sdpa", kept: bool = False) -> Run:
    """The peer; `kept` lets it have our setting of the memory, too."""
    if kept:
        keep_freed_memory()
    model, tokens = transformers_gpt2(shape, attention), shape.tokens()
    return training_step(model, lambda: model(tokens, labels=tokens).loss, dtype)


def x_transformers_step(shape: Shape, dtype: torch.dtype) -> Run:
    """Another peer, with its fused attention."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=shape.n_embd, depth=shape.n_layer, heads=shape.n_head, attn_flash=True)
    model = TransformerWrapper(
        num_tokens=shape.vocab_size, max_seq_len=shape.block_size, attn_layers=layers, tie_embedding=True
    ).to(DEVICE)
    tokens = shape.tokens()
    return training_step(model, lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()), dtype)


def our_generation(
    shape: Shape, dtype: torch.dtype, count: int, rows: int = 1, kv_cache: bool = True, context_shift: int = 0
) -> Run:
    """So many tokens after a prompt of one, sampled among the 50 likeliest."""
    model = ours(shape, "sdpa").to(dtype).eval()
    prompt = torch.zeros(rows, 1, dtype=torch.int64, device=DEVICE)
    options = {"top_k": 50, "kv_cache": kv_cache, "context_shift": context_shift}
    return lambda: list(generate(model, prompt, count, **options))  # type: ignore[arg-type]


def transformers_generation(shape: Shape, dtype: torch.dtype, count: int, rows: int = 1) -> Run:
    """The peer with its cache; it, too, samples among the 50 likeliest."""
    model = transformers_gpt2(shape).to(dtype).eval()
    prompt = torch.zeros(rows, 1, dtype=torch.int64, device=DEVICE)
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": True, "top_k": 50, "pad_token_id": 0}
    return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def windows_generation(shape: Shape, count: int) -> Run:
    """As nanoGPT and minGPT generate, by transformers' model: the whole window through the model for every token."""
    model = transformers_gpt2(shape).eval()

    @torch.inference_mode()
    def run() -> None:
        ids = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
        for _ in range(count):
            logits = model(ids[:, -shape.block_size :], logits_to_keep=1, use_cache=False).logits[:, -1]
            likeliest, candidates = logits.topk(50)
            ids = torch.cat((ids, candidates.gather(1, torch.multinomial(likeliest.softmax(-1), 1))), dim=1)

    return run


def matrix_product(size: int) -> Run:
    """A large product in bfloat16: 2 size³ operations."""
    a, b = (torch.randn(size, size, device=DEVICE).bfloat16() for _ in range(2))
    return lambda: a @ b


def nothing() -> Run:
    """What a process costs before it has a model."""
    return lambda: None


BF16, FP32 = torch.bfloat16, torch.float32
PADDING = 64  # of the vocabulary, as the preset gpt2_124m has it
CONTEXT_1024 = Shape(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, batch_size=1)

CASES: dict[str, Callable[[], Run]] = {
    "small step ours": partial(our_step, SMALL, BF16),
    "small step ours sdpa": partial(our_step, SMALL, BF16, "sdpa"),
    "small step ours defaults": partial(our_step, SMALL, BF16, activation="gelu"),
    "small step ours compiled": partial(our_step, SMALL, BF16, compiled=True),
    "small step transformers": partial(transformers_step, SMALL, BF16),
    "small step transformers eager": partial(transformers_step, SMALL, BF16, "eager"),
    "small step x-transformers": partial(x_transformers_step, SMALL, BF16),
    "gpt2 step ours": partial(our_step, GPT2, BF16, vocab_padding_multiple=PADDING),
    "gpt2 step ours compiled": partial(our_step, GPT2, BF16, compiled=True, vocab_padding_multiple=PADDING),
    "gpt2 step transformers": partial(transformers_step, GPT2, BF16),
    "gpt2 step transformers kept": partial(transformers_step, GPT2, BF16, kept=True),
    "gpt2 step x-transformers": partial(x_transformers_step, GPT2, BF16),
    "nothing": nothing,
    "matrix product": partial(matrix_product, 4096),
    "small text ours": partial(our_generation, SMALL, FP32, 256),
    "small text ours windows": partial(our_generation, SMALL, FP32, 256, kv_cache=False, context_shift=1),
    "small text transformers windows": partial(windows_generation, SMALL, 256),
    "gpt2 text fp32 ours": partial(our_generation, CONTEXT_1024, FP32, 256),
    "gpt2 text fp32 transformers": partial(transformers_generation, CONTEXT_1024, FP32, 256),
    "gpt2 text bf16 ours": partial(our_generation, CONTEXT_1024, BF16, 256),
    "gpt2 text bf16 transformers": partial(transformers_generation, CONTEXT_1024, BF16, 256),
    "gpt2 text bf16 ours 16 at once": partial(our_generation, CONTEXT_1024, BF16, 256, rows=16),
    "gpt2 text bf16 transformers 16 at once": partial(transformers_generation, CONTEXT_1024, BF16, 256, rows=16),
}


def case(name: str) -> Case:
    """The case of that name, in the process that measures it."""
    return Case({"run": CASES[name]()}, DEVICE.type)


def time_cases_in_turn(names: Iterable[str], *, rounds: int = 5) -> dict[str, Measured]:
    """Measure cases by their names.

    Raises:
        RuntimeError: one failed.
    """
    measured = measure_in_turn({name: CaseCall("bench.cases:case", {"name": name}) for name in names}, rounds=rounds)
    for name, result in measured.items():
        if result.failed:
            raise RuntimeError(f"the case {name!r} failed: {result.failed}")
    return measured
