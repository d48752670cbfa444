"""The one check to run where a GPU is at hand: right, and how quick? Under six minutes, into bench/results/gpu.md.

python -m bench.gpu_check                      the figures and whether the paths agree
python -m bench.gpu_check --peak_flops=1e15    with the utilisation of a device that is not known
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import train
from bench.tables import write_table
from comparison.agreement import agreements
from comparison.speed import Work, measure
from comparison.timing import time_in_turn
from engine.checkpoint import load_checkpoint
from engine.decoding import NextLogits
from engine.device import autocast, peak_flops
from engine.generation import generate
from model import GPT, GPTConfig

GPT2_SMALL = GPTConfig(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768, norm_placement="pre",
                       activation="gelu_tanh", attention_impl="sdpa", vocab_padding_multiple=64)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """What is checked, and how much of it.

    Attributes:
        device: where.
        config: of the model that is trained and sampled from.
        batch_size: of a training step.
        lengths: of the attention modules.
        new_tokens: of a generation.
        rounds: timings of each.
    """

    device: torch.device
    config: GPTConfig = GPT2_SMALL
    batch_size: int = 16
    lengths: tuple[int, ...] = (256, 1024, 4096)
    new_tokens: int = 256
    rounds: int = 5

    def tokens(self, rows: int, length: int) -> Tensor:
        """Random ids."""
        return torch.randint(0, self.config.vocab_size, (rows, length), device=self.device)


Rows = list[list[str]]


def parity(check: Check) -> Rows:
    """The largest difference of outputs and gradients of each path from float64, as a share of the largest value.

    Raises:
        AssertionError: the paths are not the same within rounding.
    """
    rows = []
    for case in agreements(("float32", "bfloat16"), check.config.n_embd, check.config.n_head, check.device, seed=0):
        figures = f"manual {case.manual.relative:.1e}, sdpa {case.sdpa.relative:.1e} of the largest"
        if not case.agrees:
            raise AssertionError(f"the paths differ: {case.dtype}, {case.case}, {case.of}: {figures}")
        rows.append([f"{case.of} against float64, {case.dtype}, {case.case}", figures])
    return rows


def attention_paths(check: Check) -> Rows:
    """Time and peak memory of one attention module, forward and backward, in bfloat16."""
    work = Work(check.config.n_embd, check.config.n_head, tokens=8192, device=str(check.device))
    rows = []
    for pair in measure(check.lengths, ("bfloat16",), work, check.rounds):
        told = [
            f"{name} {path.failed or f'{path.timing} ms'}, {path.own_megabytes or 0:,.0f} MB"
            for name, path in (("manual", pair.manual), ("sdpa", pair.sdpa))
        ]
        rows.append([f"attention, bf16, T = {pair.length}", f"{', '.join(told)} ({pair.sdpa.facts.get('kernel', '')})"])
    return rows


def training(check: Check, asked_peak: float) -> Rows:
    """Tokens a second of the whole training step in bfloat16, as it is and compiled, with both forms of AdamW."""
    tokens = check.tokens(check.batch_size, check.config.block_size)
    runs = {}
    for name, fused, compiled in (
        ("fused AdamW", True, False),
        ("AdamW in a loop", False, False),
        ("compiled", True, True),
    ):
        model = GPT(check.config).to(check.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused, foreach=False)
        runs[name] = _training_step(check, torch.compile(model) if compiled else model, optimizer, tokens)
    timings = time_in_turn(runs, rounds=check.rounds)
    peak = peak_flops(asked_peak, check.device, torch.bfloat16)
    rows = []
    for name, timing in timings.items():
        speed = tokens.numel() / timing.median
        share = "" if peak is None else f", {speed * check.config.operations_per_token / peak:.1%} of peak"
        size = f"{tokens.shape[0]} x {tokens.shape[1]}"
        rows.append([f"training step, {size}, bf16, {name}", f"{timing} ms, {speed:,.0f} tokens/s{share}"])
    return rows


def _training_step(
    check: Check, model: Callable[..., tuple[None, Tensor]], optimizer: torch.optim.Optimizer, tokens: Tensor
) -> Callable[[], None]:
    def step() -> None:
        with autocast(check.device, torch.bfloat16):
            _, loss = model(tokens, tokens, return_logits=False)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def generation(check: Check) -> Rows:
    """Tokens a second, with the step that is recorded as a CUDA graph and with the model as it is; the same ids."""
    model = GPT(check.config).to(check.device, torch.bfloat16).eval()
    rows = []
    for count in (1, 16):
        prompt = check.tokens(count, 8)
        quick, plain = NextLogits(model, count), NextLogits(model, count)
        plain.step = None
        runs = {
            "quick": lambda q=quick, p=prompt: list(generate(model, p, check.new_tokens, temperature=0, next_logits=q)),
            "plain": lambda q=plain, p=prompt: list(generate(model, p, check.new_tokens, temperature=0, next_logits=q)),
        }
        timings = time_in_turn(runs, rounds=check.rounds, at_least_seconds=0.0)
        speeds = {name: count * check.new_tokens / timing.median for name, timing in timings.items()}
        figures = ", ".join(f"{name} {speed:,.0f} tokens/s" for name, speed in speeds.items())
        rows.append([f"{count} texts of {check.new_tokens} tokens, bf16", figures])
    exact = GPT(replace(check.config, n_layer=2)).to(check.device).eval()
    prompt = check.tokens(2, 8)
    ids = {}
    for kv_cache in (True, False):
        ids[kv_cache] = torch.stack(list(generate(exact, prompt, 64, temperature=0, kv_cache=kv_cache)))
    if not torch.equal(ids[True], ids[False]):
        raise AssertionError("generation with the cache gives other ids than without")
    return [*rows, ["generation in float32: ids with and without cache", "the same"]]


def resume(check: Check) -> Rows:
    """A run that is interrupted and gone on with, against one that is not; the same seed twice for comparison."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("".join(f"{i} is followed by {i + 1}.\n" for i in range(3000)), encoding="utf-8")
        shape = ["--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=64", "--tokenizer=char", "--optimizer=muon"]
        common = [f"--text={text}", f"--device={check.device}", "--eval_interval=20", *shape]
        weights = {}
        for name, parts in (("whole", ["40"]), ("again", ["40"]), ("in two parts", ["20", "40"])):
            out_dir = Path(folder) / name
            for number, max_iters in enumerate(parts):
                schedule = [f"--max_iters={max_iters}", "--lr_decay_iters=40", "--learning_rate=1e-3"]
                train.main([*common, *schedule, f"--out_dir={out_dir}", *(["--resume"] if number else [])])
            weights[name] = load_checkpoint(out_dir / "last.pt", lazily=False)["model"]
    differences = {
        name: max((weights["whole"][key] - weights[name][key]).abs().max().item() for key in weights["whole"])
        for name in ("again", "in two parts")
    }
    if differences["in two parts"] > 10 * differences["again"] + 1e-5:
        raise AssertionError(f"resuming changes the weights: {differences}")
    figures = ", ".join(f"{name} {difference:.1e}" for name, difference in differences.items())
    return [["resume: largest difference of a weight after 40 updates", figures]]


def main(argv: list[str]) -> None:
    """Run every part; write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peak_flops", type=float, default=0.0)
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("gpu_check: there is no CUDA device here; `make bench` measures the CPU")
    check = Check(torch.device("cuda"))
    rows = []
    for part in (parity, attention_paths, lambda c: training(c, asked.peak_flops), generation, resume):
        rows += part(check)
        print("\n".join(": ".join(row) for row in rows), flush=True)
    print(write_table("gpu", "What a GPU gives", "python -m bench.gpu_check", ["what", "figure"], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
