"""Runs on several processes that torchrun starts, for the tests."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from engine.checkpoint import load_checkpoint
from engine.shards import write_shards
from tests.conftest import REPOSITORY, TINY, Outcome

SHARED = (*TINY, "--gradient_accumulation_steps=4", "--log_interval=1", "--optimizer=muon", "--dropout=0.1")


def started(
    processes: int,
    *argv: str,
    place: tuple[str, ...] = ("--standalone",),
    script: Path = REPOSITORY / "train.py",
    **environment: str,
) -> "subprocess.Popen[str]":
    """Start train.py, or a program that does so with something changed, in so many processes."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *place, f"--nproc_per_node={processes}", str(script), *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def torchrun(
    processes: int, *argv: str, restarts: int = 0, script: Path = REPOSITORY / "train.py", **environment: str
) -> Outcome:
    """Run it to its end, beginning again so often when a process is lost."""
    place = ("--standalone", f"--max-restarts={restarts}")
    return ended(started(processes, *argv, place=place, script=script, **environment))


def ended(job: "subprocess.Popen[str]") -> Outcome:
    """How it ended; one that hangs is stopped, and its processes with it."""
    try:
        out, err = job.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        job.terminate()
        out, err = job.communicate(timeout=60)
    return Outcome(job.returncode, out, err)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(load_checkpoint(run / "last.pt", lazily=False)["model"])


def assert_same_weights(one: Path, other: Path, atol: float = 1e-6) -> None:
    for (name, value), (other_name, other_value) in zip(weights(one).items(), weights(other).items(), strict=True):
        assert name == other_name
        torch.testing.assert_close(value, other_value, atol=atol, rtol=1e-5, msg=name)


def changed(tmp_path: Path, body: str) -> Path:
    """A program that trains, and does something more before each update."""
    before_it = f"    {body}\n    return real(run, forward, batches, step, dtype)\n"
    return program(tmp_path, "update", f"def changed(run, forward, batches, step, dtype):\n{before_it}")


def program(tmp_path: Path, name: str, definition: str) -> Path:
    """A program that trains with a function of train.py replaced.

    The definition is of `changed`; `real` is what it replaces, `rank` is the process and `restarts` which try it is.
    """
    path = tmp_path / "changed.py"
    path.write_text(
        "import os, signal, sys, time\nimport train\nfrom config.errors import run_command\n"
        "rank, restarts = int(os.environ['RANK']), int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        f"real = train.{name}\n{definition}train.{name} = changed\nrun_command(train.main)\n"
    )
    return path


def as_process(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))


def in_shards(path: Path) -> None:
    """Turn a checkpoint of one file into one in shards, as several processes write it."""
    content = load_checkpoint(path, lazily=False)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is one process, here
    torch.save(write_shards(path, content, in_use=None), path)
