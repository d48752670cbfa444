"""Killed at random moments: a run that is killed again and again ends with the weights of one that never was.

python -m tests.crash FOLDER KILLS SEED     prints what came of it, as JSON

Each process that trains is forked from this one, which has imported everything and computed nothing, so that a try
takes a tenth of a second.
"""

import contextlib
import faulthandler
import io
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import train
from config.preparation import PrepareSettings
from data.preparation import prepare
from data.sources import open_source
from engine.checkpoint import load_checkpoint
from tests.conftest import TEXT, TINY

UPDATES = 80
HANGS_AFTER = 60  # seconds
LIFETIME = 0.35  # seconds; a process is killed somewhere in it, or ends before


def train_in(out_dir: Path, data: Path) -> None:
    """What a user does after a crash: the same command, with --resume where there is something to go on from."""
    options = ["--dropout=0.1", "--optimizer=muon", "--gradient_accumulation_steps=2", "--log_interval=1", *TINY]
    resume = ["--resume"] if (out_dir / "last.pt").exists() else []
    places = [f"--data_dir={data}", f"--out_dir={out_dir}"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train.main([*places, f"--max_iters={UPDATES}", "--eval_interval=1", *options, *resume])


def forked(work: Callable[[], None], lifetime: float | None = None) -> int | None:
    """Do something in a process of its own, killed after so many seconds; its exit status, or None when killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if lifetime is not None:
        deadline = time.monotonic() + lifetime
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if code == -signal.SIGKILL else code


def prepare_in(folder: Path) -> None:
    """The data of all runs."""
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with open_source(str(folder / "text.txt"), folder) as source:
        prepare(source, PrepareSettings(source="text.txt", tokenizer="char"), folder / "data")


def check_saved(out_dir: Path) -> None:
    """Whatever checkpoint is there is whole."""
    for name in ("last.pt", "best.pt"):
        if (out_dir / name).exists():
            content = load_checkpoint(out_dir / name, lazily=False)
            assert all(bool(torch.isfinite(tensor).all()) for tensor in content["model"].values())


def check_end(out_dir: Path, undisturbed: Path) -> None:
    """A run that was killed on its way ended as the undisturbed one did, and left nothing else behind."""
    both = (out_dir, undisturbed)
    for file in ("last.pt", "best.pt"):
        weights, expected = (load_checkpoint(folder / file, lazily=False)["model"] for folder in both)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected), f"other weights in {file}"
    lines = []
    for folder in both:
        written = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        lines.append([(line["step"], line.get("loss"), line.get("val_loss")) for line in written])
    assert lines[0] == lines[1], "another metrics.jsonl"
    assert not list(out_dir.glob(".*.tmp")), "leavings of a killed process"


def main(folder: Path, kills: int, seed: int) -> None:
    """Kill so many processes; every run among them that ends must end as the undisturbed one did."""
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # its thread would not survive a fork
    rng, data, whole = random.Random(seed), folder / "data", folder / "whole"
    assert forked(partial(prepare_in, folder)) == forked(partial(train_in, whole, data)) == 0
    done, while_saving, runs = 0, 0, 0
    while done < kills:
        out_dir, status = folder / f"run-{runs}", None
        while status is None:
            status = forked(partial(train_in, out_dir, data), rng.uniform(0, LIFETIME) if done < kills else None)
            if status is None:
                done += 1
                while_saving += any(out_dir.glob(".*.pt.*.tmp"))
                assert forked(partial(check_saved, out_dir)) == 0, f"run {runs}, kill {done}"
        assert status == 0 and forked(partial(check_end, out_dir, whole)) == 0, f"run {runs}, after {done} kills"
        runs += 1
    print(json.dumps({"kills": done, "while_saving": while_saving, "runs": runs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
