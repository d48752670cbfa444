"""The same run on several processes that torchrun starts: by gloo, on the CPU."""

import contextlib
import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from config.errors import UserError
from data.batches import TrainingBatches
from data.dataset import PreparedData
from engine import distributed
from engine.checkpoint import load_checkpoint
from engine.step_log import read_step_log
from tests.conftest import TINY, Outcome, run_train
from tests.several import SHARED, as_process, assert_same_weights, changed, ended, started, torchrun, weights

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="gloo is tried on Linux")


@dataclass
class Runs:
    """The same run on one, two and four processes, and what was printed by those of two."""

    folder: Path
    said: dict[int, Outcome]


@pytest.fixture(scope="module")
def runs(char_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder, said = tmp_path_factory.mktemp("distributed"), {}
    for processes in (1, 2, 4):
        options = (
            f"--data_dir={char_data}",
            f"--out_dir={folder / str(processes)}",
            "--max_iters=6",
            "--eval_interval=2",
            "--peak_flops=1e12",
        )
        said[processes] = run_train(*options, *SHARED) if processes == 1 else torchrun(processes, *options, *SHARED)
        assert said[processes].status == 0, said[processes].stderr
    return Runs(folder, said)


@pytest.mark.parametrize("processes", [2, 4])
def test_T11_losses_tokens_and_weights_do_not_depend_on_the_number_of_processes(processes: int, runs: Runs) -> None:
    """With dropout, too: what is dropped depends on the micro-batch, not on who computes it."""
    alone, together = (read_step_log(runs.folder / str(n) / "metrics.jsonl") for n in (1, processes))
    assert len(alone) == len(together) == 9
    for one, other in zip(alone, together, strict=True):
        assert one.keys() == other.keys() and one.get("tokens") == other.get("tokens")
        for name in ("loss", "gradient_norm", "val_loss", "val_bits_per_byte", "val_tokens"):
            if name in one:
                assert other[name] == pytest.approx(one[name], abs=1e-6, rel=1e-6), name
    assert_same_weights(runs.folder / "1", runs.folder / str(processes))


def test_P01_utilisation_is_of_the_peak_of_all_processes_together(runs: Runs) -> None:
    for processes in (1, 2):
        lines = [line for line in read_step_log(runs.folder / str(processes) / "metrics.jsonl") if "mfu" in line]
        per_token = {line["mfu"] * processes * 1e12 / line["tokens_per_second"] for line in lines}
        assert len(lines) == 6 and max(per_token) == pytest.approx(min(per_token), rel=1e-2)
        assert max(per_token) == pytest.approx(6 * 4464, rel=0.5)  # six operations a parameter, and attention's


def test_K02_a_compiled_model_is_shared_among_processes_too(char_data: Path, tmp_path: Path) -> None:
    options = (f"--data_dir={char_data}", "--compile", "--max_iters=3", "--eval_interval=3", *SHARED, "--dropout=0")
    alone = run_train(*options, f"--out_dir={tmp_path / '1'}")
    together = torchrun(2, *options, f"--out_dir={tmp_path / '2'}")
    for outcome in (alone, together):
        assert outcome.status == 0 and "going on without" not in outcome.stderr, outcome.stderr
    assert "compile True" in together.stdout
    assert_same_weights(tmp_path / "1", tmp_path / "2")


@pytest.mark.parametrize("processes", [2, 4])
def test_T13_T14_one_process_prints_and_writes(processes: int, runs: Runs) -> None:
    said, folder = runs.said[processes], runs.folder / str(processes)
    for word in ("model    ", "best validation loss", "sample from it with", "step 4: validation loss"):
        assert said.stdout.count(word) == 1, word
    assert f"{processes} processes (ddp), the first on cpu" in said.stdout
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "best.pt", "last.pt", "metrics.jsonl", "samples.jsonl", "settings.toml",
    }  # fmt: skip
    assert [line["step"] for line in read_step_log(folder / "samples.jsonl")] == [2, 4, 6]
    assert load_checkpoint(folder / "last.pt")["step"] == 6


def test_T12_on_a_cpu_gloo_joins_them_and_is_left_in_order(runs: Runs) -> None:
    assert "destroy_process_group" not in runs.said[2].stderr and "Warning" not in runs.said[2].stderr


def test_K02_names_in_the_checkpoint_have_no_prefix(runs: Runs) -> None:
    assert weights(runs.folder / "2").keys() == weights(runs.folder / "1").keys()
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in weights(runs.folder / "2"))


def test_a_run_goes_on_with_another_number_of_processes(runs: Runs, char_data: Path, tmp_path: Path) -> None:
    for name, begins, ends in (("more", 1, 2), ("fewer", 2, 1)):
        for updates, processes in ((2, begins), (6, ends)):
            options = [
                f"--out_dir={tmp_path / name}",
                f"--max_iters={updates}",
                "--lr_decay_iters=6",
                "--eval_interval=2",
            ]
            options += ["--resume"] if updates == 6 else [f"--data_dir={char_data}", *SHARED]
            outcome = run_train(*options) if processes == 1 else torchrun(processes, *options)
            assert outcome.status == 0, outcome.stderr
        assert_same_weights(tmp_path / name, runs.folder / "1")


def test_T10_micro_batches_that_cannot_be_shared_are_refused_once_with_the_nearest_number(
    char_data: Path, tmp_path: Path
) -> None:
    options = (f"--data_dir={char_data}", f"--out_dir={tmp_path / 'run'}", "--gradient_accumulation_steps=3", *TINY)
    outcome = torchrun(2, *options)
    assert outcome.status != 0 and not (tmp_path / "run").exists()
    message = r"gradient_accumulation_steps = 3: 2 processes share .* a multiple of 2; the nearest is 4"
    assert len(re.findall(message, outcome.stderr)) == 1, outcome.stderr
    assert "AssertionError" not in outcome.stderr


KILLED = "if rank == 1 and step == 3 and restarts == 0: os.kill(os.getpid(), signal.SIGKILL)"


def test_a_killed_worker_comes_back_and_the_run_ends_as_if_undisturbed(
    runs: Runs, char_data: Path, tmp_path: Path
) -> None:
    options = (f"--data_dir={char_data}", f"--out_dir={tmp_path / 'run'}", "--max_iters=6", "--eval_interval=2")
    outcome = torchrun(
        2,
        *options,
        *SHARED,
        restarts=1,
        script=changed(tmp_path, KILLED),
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    assert outcome.status == 0, outcome.stderr
    assert_same_weights(tmp_path / "run", runs.folder / "1")
    lines = [line for line in read_step_log(tmp_path / "run/metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


HANGS = "if rank == 1 and step == 3: signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(600)"


@pytest.mark.parametrize(
    "body",
    [KILLED, HANGS],
    ids=["a process is gone", "a process hangs"],
)
def test_a_lost_process_does_not_leave_the_others_hanging(body: str, char_data: Path, tmp_path: Path) -> None:
    options = (f"--data_dir={char_data}", f"--out_dir={tmp_path / 'run'}", "--max_iters=6", "--eval_interval=2")
    started = time.monotonic()
    outcome = torchrun(2, *options, *SHARED, "--collective_timeout=5", script=changed(tmp_path, body))
    assert outcome.status != 0 and time.monotonic() - started < 60
    if "sleep" in body:
        assert "process 0 of 2: lost another one" in outcome.stderr and "--resume" in outcome.stderr
    assert load_checkpoint(tmp_path / "run/last.pt")["step"] == 2


def test_K07_a_signal_to_one_process_stops_all_and_saves(char_data: Path, tmp_path: Path) -> None:
    body = "if rank == 1 and step == 3: signal.raise_signal(signal.SIGTERM)"
    options = (f"--data_dir={char_data}", f"--out_dir={tmp_path / 'run'}", "--max_iters=50", "--eval_interval=50")
    outcome = torchrun(2, *options, *SHARED, script=changed(tmp_path, body))
    assert outcome.status != 0 and outcome.stdout.count("interrupted after step 4 and saved") == 1, outcome.stderr
    assert load_checkpoint(tmp_path / "run/last.pt")["step"] == 4


def test_T01_a_run_that_diverges_says_so_once(char_data: Path, tmp_path: Path) -> None:
    options = (f"--data_dir={char_data}", f"--out_dir={tmp_path / 'run'}", "--max_iters=50", "--eval_interval=50")
    outcome = torchrun(2, *options, *SHARED, "--learning_rate=1e38", "--optimizer=adamw")
    assert outcome.status != 0 and outcome.stderr.count("the training has diverged") == 1, outcome.stderr
    assert not (tmp_path / "run/last.pt").exists()


def test_two_machines_that_find_each_other_are_one_run(runs: Runs, char_data: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = (
        f"--data_dir={char_data}",
        f"--out_dir={tmp_path / 'run'}",
        "--max_iters=6",
        "--eval_interval=2",
        *SHARED,
    )
    place = ("--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=one")
    machines = [started(1, *options, place=place) for _ in range(2)]
    outcomes = [ended(machine) for machine in machines]
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    assert sorted(outcome.stdout.count("2 processes (ddp)") for outcome in outcomes) == [0, 1]
    assert_same_weights(tmp_path / "run", runs.folder / "1")


def test_K07_when_torchrun_is_told_to_stop_all_processes_save_and_leave(char_data: Path, tmp_path: Path) -> None:
    """As a cluster does when a job's time is over."""
    run = tmp_path / "run"
    options = (f"--data_dir={char_data}", f"--out_dir={run}", "--max_iters=1000000", "--eval_interval=1000000", *SHARED)
    job = started(2, *options)
    metrics, since = run / "metrics.jsonl", time.monotonic()
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < since + 60:
        time.sleep(0.1)
    job.terminate()
    outcome = ended(job)
    assert outcome.status != 0 and outcome.stdout.count("interrupted after step") == 1, outcome.stderr
    assert load_checkpoint(run / "last.pt")["step"] >= 1


# --- without processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_micro_batches_of_all_processes_are_those_of_one(
    size: int, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = PreparedData(char_data)
    options: dict[str, Any] = {
        "block_size": 8, "batch_size": 2, "micro_batches": 8, "seed": 3, "device": torch.device("cpu"),
    }  # fmt: skip
    whole = TrainingBatches(data.train, **options)
    shared = []
    for rank in range(size):
        as_process(monkeypatch, rank, size)
        own = distributed.own_micro_batches(8)
        part = TrainingBatches(data.train, **options, own=own)
        assert part.tokens_per_step == whole.tokens_per_step
        shared += list(part.global_batch(5))
    for (inputs, targets), (other_inputs, other_targets) in zip(whole.global_batch(5), shared, strict=True):
        assert torch.equal(inputs, other_inputs) and torch.equal(targets, other_targets)


@pytest.mark.parametrize(("steps", "size", "nearest"), [(1, 2, 2), (3, 4, 4), (7, 4, 8), (9, 4, 8)])
def test_T10_the_nearest_number_is_a_multiple_of_the_processes(
    steps: int, size: int, nearest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_process(monkeypatch, 0, size)
    with pytest.raises(UserError, match=rf"= {steps}: {size} processes share .* the nearest is {nearest}$"):
        distributed.own_micro_batches(steps)


def test_restarts_ask_for_the_variable_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    as_process(monkeypatch, 0, 2)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    asked = pytest.raises(UserError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun")
    with asked, distributed.process_group(torch.device("cpu"), 10):
        pass


def test_a_stray_variable_of_somebodys_shell_makes_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert distributed.rank() == 0 and distributed.world_size() == 1 and distributed.is_first()
    assert distributed.own_micro_batches(1) == range(1)


@pytest.mark.parametrize("fails", [False, True])
def test_T12_the_group_is_left_however_the_run_ends(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, timeout: told.append(backend))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: told[-1:] == ["gloo"])
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: told.append("left"))
    as_process(monkeypatch, 0, 2)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    with contextlib.suppress(ValueError), distributed.process_group(torch.device("cpu"), 10):
        if fails:
            raise ValueError("the run fails")
    assert told == ["gloo", "left"]


def test_gradients_take_no_memory_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    as_process(monkeypatch, 0, 2)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        forward = distributed.replicated(model, torch.device("cpu"))
        for _ in range(2):  # buckets are arranged anew after the first
            forward(torch.ones(1, 4)).sum().backward()
        places = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
        assert len(places) == 1
    finally:
        torch.distributed.destroy_process_group()


def test_what_all_find_wrong_is_said_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, expected in ((0, UserError), (1, SystemExit)):
        as_process(monkeypatch, rank, 2)
        with pytest.raises(expected), distributed.said_once():
            raise UserError("wrong")


def test_each_process_of_a_machine_has_a_gpu_of_its_own_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    as_process(monkeypatch, 1, 2)
    assert distributed.own_device(torch.device("cuda")) == torch.device("cuda", 1) == chosen[0]
    assert distributed.own_device(torch.device("cuda", 0)) == torch.device("cuda", 0) == chosen[1]
    assert distributed.own_device(torch.device("cpu")) == torch.device("cpu")


def test_T14_a_process_that_is_not_the_first_saves_nothing(
    char_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.run.is_first", lambda: False)
    outcome = run_train(f"--data_dir={char_data}", f"--out_dir={tmp_path / 'run'}", "--max_iters=2", *TINY)
    assert outcome.status == 0, outcome.stderr
    assert not {"last.pt", "best.pt", "settings.toml"} & {path.name for path in (tmp_path / "run").iterdir()}
