"""The same training run on one and on two processes: how quick, and how much they tell each other.

python -m bench.scaling

Every process has one core. What is told is counted where it passes, on the loopback device (Linux).
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.tables import write_table
from comparison.processes import ROOT
from comparison.timing import Timing
from config.command_line import parse
from config.schema import TrainSettings
from engine.step_log import read_step_log
from model import GPTConfig

ROUNDS = 5
UPDATES = 8
FEWER_UPDATES = 3  # what is told at the beginning and the end is the same, and falls out of the difference
RUN = (
    "--n_layer=6", "--n_head=8", "--n_embd=512", "--block_size=256", "--norm_placement=pre", "--attention_impl=manual",
    "--batch_size=4", "--gradient_accumulation_steps=4", "--optimizer=adamw", "--device=cpu", "--dtype=bfloat16",
    "--log_interval=1", "--sample_tokens=0", "--report=false", "--val_fraction=0.001",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a run takes place."""

    name: str
    processes: int
    parallel: str = "ddp"
    threads: int = 1


PLACES = (
    Place("1 process, 1 core", 1),
    Place("1 process, 2 cores", 1, threads=2),
    Place("2 processes, ddp", 2),
    Place("2 processes, fsdp", 2, "fsdp"),
)


def ddp_bytes(parameters: int, processes: int) -> float:
    """Bytes that each process sends for an update with DDP: float32 gradients, summed around a ring.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    return 2 * (processes - 1) / processes * 4 * parameters


def fsdp_bytes(in_blocks: int, elsewhere: int, processes: int, micro_batches: int, *, gloo: bool = False) -> float:
    """Bytes that each process sends for an update with `--parallel=fsdp` in 16 bits.

    For every micro-batch the blocks' parameters are put together twice, for the forward and the backward pass, in 2
    bytes each; those elsewhere once, in 4 bytes; and all gradients are summed and shared out, in 4 bytes.

    Args:
        in_blocks: parameters of the blocks; their norms, which travel in 4 bytes, are too few to tell apart.
        elsewhere: those of embeddings and head.
        processes: N.
        micro_batches: that each process computes for an update.
        gloo: it sums whole gradients and takes a part of the sum, which is twice as much.

    Source: Rajbhandari et al. 2020, "ZeRO", section 7.2.
    """
    gathered = 2 * 2 * in_blocks + 4 * elsewhere
    scattered = (2 if gloo else 1) * 4 * (in_blocks + elsewhere)
    return micro_batches * (processes - 1) / processes * (gathered + scattered)


def parameters_of(config: GPTConfig) -> tuple[int, int]:
    """Parameters in blocks and norms, and those of embeddings and head."""
    elsewhere = config.padded_vocab_size * config.n_embd * (1 if config.tied_head else 2)
    elsewhere += config.block_size * config.n_embd if config.position == "learned" else 0
    return config.parameter_count - elsewhere, elsewhere


@contextmanager
def trained(place: Place, updates: int) -> Iterator[Path]:
    """A run of so many updates, for as long as the block needs it."""
    start = [sys.executable]
    if place.processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={place.processes}"]
    with tempfile.TemporaryDirectory() as folder:
        out_dir = Path(folder, "run")
        own = (
            f"--out_dir={out_dir}",
            f"--max_iters={updates}",
            f"--eval_interval={updates}",
            f"--parallel={place.parallel}",
        )
        subprocess.run(
            [*start, "train.py", *RUN, *own, f"--parallel={place.parallel}"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(place.threads)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        yield out_dir


def seconds_per_update(run: Path) -> float:
    """The median over the updates of a run, without the first two."""
    updates = [line for line in read_step_log(run / "metrics.jsonl") if "loss" in line][2:]
    tokens = updates[0]["tokens"] / updates[0]["step"]
    return Timing(tuple(tokens / line["tokens_per_second"] for line in updates)).median


def passed_on_loopback() -> int:
    """Bytes so far."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[0])
    raise RuntimeError("there is no loopback device")


def told_per_update(place: Place) -> float:
    """Bytes that all processes of a place send for one update."""
    passed = []
    for updates in (FEWER_UPDATES, UPDATES):
        before = passed_on_loopback()
        with trained(place, updates):
            passed.append(passed_on_loopback() - before)
    return (passed[1] - passed[0]) / (UPDATES - FEWER_UPDATES)


def worked_out(place: Place, settings: TrainSettings) -> float:
    """Bytes that all processes of a place send for one update, by the formulas."""
    config = settings.gpt_config(settings.vocab_size)
    if place.parallel == "ddp":
        return place.processes * ddp_bytes(config.parameter_count, place.processes)
    micro_batches = settings.gradient_accumulation_steps // place.processes
    return place.processes * fsdp_bytes(*parameters_of(config), place.processes, micro_batches, gloo=True)


def main() -> None:
    """Time all places in turn, count what is told, and write the table."""
    settings = parse(TrainSettings, list(RUN))
    seconds: dict[Place, list[float]] = {place: [] for place in PLACES}
    for _ in range(ROUNDS):
        for place in PLACES:
            with trained(place, UPDATES) as run:
                seconds[place].append(seconds_per_update(run))
    alone = Timing(tuple(seconds[PLACES[0]])).median
    rows = []
    for place in PLACES:
        timing = Timing(tuple(seconds[place]))
        told = ["", ""]
        if place.processes > 1:
            told = [f"{size / 1e6:,.1f}" for size in (told_per_update(place), worked_out(place, settings))]
        rows.append([place.name, str(timing), f"{alone / timing.median:.2f}", *told])
        print(" | ".join(rows[-1]), flush=True)
    columns = ["where", "an update, ms (min to max)", "times as quick", "told, MB", "by the formula, MB"]
    parameters = settings.gpt_config(settings.vocab_size).parameter_count
    title = f"One run on one and two processes, {parameters:,} parameters, 4 micro-batches of 4 x 256 tokens"
    print(write_table("scaling", title, "python -m bench.scaling", columns, rows))


if __name__ == "__main__":
    main()
