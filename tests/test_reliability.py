"""Runs that cannot be lost: killed, doubled, diverging, watched by a failing service, or fed with damaged files."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.run
import train
from config.errors import UserError
from data.files import clear_unfinished, written_whole
from engine.checkpoint import load_checkpoint, model_from_checkpoint, save_checkpoint
from engine.run import sole_use
from model import GPT, GPTConfig
from tests.conftest import REPOSITORY, TINY, Outcome, assert_clean_error, run_train, script

KILLS = 100
DAMAGED_FILES = 8_400


def module(name: str, *arguments: object) -> dict[str, int]:
    """What a program of the tests prints as JSON."""
    command = [sys.executable, "-m", f"tests.{name}", *map(str, arguments)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    return json.loads(result.stdout)


def metrics(out_dir: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(out_dir, "metrics.jsonl").read_text().splitlines()]


def train_on(data: Path, out_dir: str, *arguments: str) -> Outcome:
    return run_train(f"--data_dir={data}", f"--out_dir={out_dir}", "--log_interval=1", *TINY, *arguments)


# --- Killed -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the tries are forked")
def test_K08_a_run_killed_at_any_moment_has_a_whole_checkpoint_and_ends_as_if_undisturbed(tmp_path: Path) -> None:
    result = module("crash", tmp_path, KILLS, 1)
    assert result["kills"] == KILLS and result["runs"] >= 3 and result["while_saving"] >= 3, result
    print(f"killed {result}")


def test_K08_what_a_killed_process_left_half_written_is_cleared_by_the_next(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys, time\nfrom pathlib import Path\nfrom data.files import written_whole\n"
         "with written_whole(Path(sys.argv[1])) as file: file.write(b'half'); print(1, flush=True); time.sleep(9)",
         str(tmp_path / "last.pt")], cwd=REPOSITORY, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"1\n"
    process.kill()
    process.communicate()
    (tmp_path / ".mine.tmp").write_text("a file of the user's")
    assert len(list(tmp_path.iterdir())) == 2 and not (tmp_path / "last.pt").exists()
    clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".mine.tmp"]


@pytest.mark.parametrize("earlier", [True, False])
def test_K08_a_run_killed_between_last_and_best_goes_on_and_makes_up_for_the_best(
    earlier: bool, here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--eval_interval=5", "--lr_decay_iters=15")
    assert train_on(char_data, "run", *arguments, "--max_iters=5").status == 0
    best, real = here / "run" / "best.pt", engine.run.save_checkpoint
    if not earlier:
        best.unlink()

    def killed(path: Path, content: dict[str, Any]) -> None:
        if path.name == "best.pt":
            raise KeyboardInterrupt
        real(path, content)

    monkeypatch.setattr(engine.run, "save_checkpoint", killed)
    assert train_on(char_data, "run", *arguments, "--max_iters=10", "--resume").status == 130
    monkeypatch.setattr(engine.run, "save_checkpoint", real)
    assert load_checkpoint(here / "run" / "last.pt")["step"] == (10 if earlier else 5)
    assert train_on(char_data, "run", "--resume", "--max_iters=10", "--learning_rate=0").status == 0
    last = load_checkpoint(here / "run" / "last.pt", lazily=False)
    saved = load_checkpoint(best, lazily=False)
    assert saved["best_loss"] == last["best_loss"] and "optimizer" not in saved
    assert all(torch.equal(saved["model"][name], last["model"][name]) for name in last["model"])


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="there is no C++ compiler")
def test_K02_a_compiled_run_is_resumed_exactly_and_without_its_prefix(
    here: Path, char_data: Path, request: pytest.FixtureRequest
) -> None:
    arguments = ("--compile", "--optimizer=muon", "--dropout=0.1", "--lr_decay_iters=8", "--eval_interval=4")
    for out_dir, parts in (("whole", (8,)), ("parts", (4, 8))):
        for number, max_iters in enumerate(parts):
            torch.compiler.reset()  # as in a new process
            request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
            resume = ("--resume",) if number else ()
            outcome = train_on(char_data, out_dir, *arguments, f"--max_iters={max_iters}", *resume)
            assert outcome.status == 0 and "going on without" not in outcome.stderr, outcome.stderr
    whole, parts_ = (load_checkpoint(here / name / "last.pt", lazily=False) for name in ("whole", "parts"))
    assert not any("_orig_mod" in name for name in whole["model"])
    assert all(torch.equal(whole["model"][name], parts_["model"][name]) for name in whole["model"])


# --- Two runs in one folder ---------------------------------------------------------------------------------------


def test_a_second_run_in_the_same_folder_is_refused_and_harms_nothing(tmp_path: Path, char_data: Path) -> None:
    arguments = [f"--data_dir={char_data}", "--out_dir=run", "--log_interval=1", *TINY, "--max_iters=100000"]
    first = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "train.py"), *arguments, "--eval_interval=5"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "last.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        second = script("train.py", *arguments, "--resume", cwd=tmp_path)
        assert_clean_error(second, "run: another process is training in it", "--out_dir")
        assert first.poll() is None, "the first goes on"
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    step = load_checkpoint(tmp_path / "run" / "last.pt")["step"]
    after = script("train.py", "--out_dir=run", "--resume", f"--max_iters={step + 2}", cwd=tmp_path)
    assert after.status == 0, "a killed process leaves no lock behind: " + after.stderr


def test_a_folder_that_was_made_for_nothing_is_gone_again(here: Path) -> None:
    outcome = run_train("--text=no-such-file.txt", "--out_dir=new/runs/here")
    assert_clean_error(outcome, "no-such-file.txt")
    assert not (here / "new").exists()
    (here / "old").mkdir()
    (here / "old" / "best.pt").write_text("a file of the user's")
    assert_clean_error(run_train("--out_dir=old"), "best.pt that this run would replace")
    assert [path.name for path in (here / "old").iterdir()] == ["best.pt"]
    (here / "old" / "best.pt").unlink()
    with contextlib.suppress(UserError), sole_use(here / "old" / "run"):
        raise UserError("something else")
    assert list((here / "old").iterdir()) == []


# --- Numbers ------------------------------------------------------------------------------------------------------


def broken_at(steps: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of these steps (counted from 0) are NaN."""
    real, step = train.dropout_seed, {"now": -1}
    backward = torch.Tensor.backward

    def counting(*arguments: int) -> int:
        step["now"] = arguments[1]
        return real(*arguments)

    def breaking(tensor: torch.Tensor, *arguments: Any, **named: Any) -> None:
        backward(tensor * float("nan") if step["now"] in steps else tensor, *arguments, **named)

    monkeypatch.setattr(train, "dropout_seed", counting)
    monkeypatch.setattr(torch.Tensor, "backward", breaking)


def test_T01_single_updates_without_finite_gradients_may_be_left_out_and_are_counted(
    here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_at({3, 6}, monkeypatch)
    arguments = ("--dropout=0.1", "--eval_interval=2", "--lr_decay_iters=10")
    outcome = train_on(char_data, "run", *arguments, "--max_iters=10", "--skip_nonfinite=2")
    assert outcome.status == 0 and "2 of the updates had no finite loss or gradient" in outcome.stdout, outcome
    lines = {line["step"]: line for line in metrics("run") if "loss" in line}
    assert lines[4]["gradient_norm"] is None and lines[4]["skipped"] == 1 and lines[10]["skipped"] == 2
    assert "skipped" not in lines[3] and lines[10]["gradient_norm"] > 0
    train_on(char_data, "parts", *arguments, "--max_iters=5", "--skip_nonfinite=2")
    train_on(char_data, "parts", *arguments, "--max_iters=10", "--resume")
    whole, parts = (load_checkpoint(here / name / "last.pt", lazily=False) for name in ("run", "parts"))
    assert whole["skipped"] == parts["skipped"] == 2, "the count, too, goes on"
    assert all(torch.equal(whole["model"][name], parts["model"][name]) for name in whole["model"])


def test_T01_more_broken_updates_than_may_be_left_out_stop_the_run_at_their_step(
    here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_at({3, 6}, monkeypatch)
    for skip, stops_at in ((0, 4), (1, 7)):
        outcome = train_on(
            char_data, f"run{skip}", "--dropout=0.1", "--max_iters=10", "--eval_interval=2", f"--skip_nonfinite={skip}"
        )
        assert_clean_error(outcome, f"step {stops_at}:", "gradient's norm nan", "last.pt")
        saved = load_checkpoint(here / f"run{skip}" / "last.pt")
        assert saved["step"] == stops_at // 2 * 2 - (2 if stops_at % 2 == 0 else 0)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in saved["model"].values())


# --- Damaged and hostile files ------------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited and measured as Linux does it")
def test_K08_C05_damaged_files_load_or_end_in_a_clean_error(tmp_path: Path) -> None:
    result = module("fuzz", tmp_path, DAMAGED_FILES, 1)
    assert result["loads"] + result["clean errors"] == DAMAGED_FILES
    assert min(result["loads"], result["clean errors"]) > 500, result
    assert result["peak_megabytes"] < 1500, result


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layer": 10**6}, "1 layers, but an architecture of 1000000 layers"),
        ({"n_embd": 10**6, "n_head": 1}, "width 1000000"),
        ({"vocab_padding_multiple": 2**40}, "numbers in 1 layers"),
        ({"n_layer": 3}, "3 layers"),
        ({"block_size": 2**40}, "expected at most"),
    ],
)
def test_K08_an_architecture_larger_than_its_weights_is_refused_before_memory_is_asked_for(
    change: dict[str, int], words: str, char_run: Path
) -> None:
    content = load_checkpoint(char_run / "last.pt")
    content["model_config"] = {**content["model_config"], **change}
    with pytest.raises(UserError, match=words):
        model_from_checkpoint(content, char_run)


def test_K08_a_tensor_that_claims_more_than_the_file_holds_is_refused(char_run: Path, tmp_path: Path) -> None:
    content = load_checkpoint(char_run / "last.pt", lazily=False)
    name = "token_embedding.weight"
    content["model"][name] = torch.zeros(1).expand(content["model"][name].shape)
    save_checkpoint(tmp_path / "last.pt", content)
    with pytest.raises(UserError, match=f"{name} is not a plain tensor"):
        model_from_checkpoint(load_checkpoint(tmp_path / "last.pt"), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_head": False}, {"bias": False}, {"position": "rotary"}, {"norm_placement": "pre"},
     {"vocab_padding_multiple": 64}, {"position": "rotary", "bias": False, "norm_placement": "pre"}],
)  # fmt: skip
def test_an_architecture_knows_its_parameters(changes: dict[str, Any]) -> None:
    config = GPTConfig(**{"block_size": 8, "vocab_size": 11, "n_layer": 3, "n_head": 2, "n_embd": 8} | changes)
    assert config.parameter_count == GPT(config).parameter_count()


# --- wandb --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_in", ["log", "finish"])
def test_L02_wandb_failing_in_the_middle_never_harms_the_run(
    fails_in: str, here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        id = "abc"

        def log(self, values: dict[str, Any], step: int) -> None:
            if fails_in == "log" and step >= 3:
                raise ConnectionError("the service is gone\nand more")

        def finish(self) -> None:
            if fails_in == "finish":
                raise RuntimeError("cannot finish")

    monkeypatch.setattr("engine.tracking._start_wandb", lambda *arguments: Failing())
    outcome = train_on(char_data, "run", "--max_iters=6", "--wandb=offline")
    assert outcome.status == 0 and outcome.stdout.count("wandb: failed") == 1, outcome.stdout
    assert [line["step"] for line in metrics("run") if "loss" in line] == list(range(1, 7))
    assert load_checkpoint(here / "run" / "last.pt")["step"] == 6


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="its service is found as Linux tells it")
def test_L02_a_killed_wandb_service_does_not_harm_or_hang_a_run(tmp_path: Path, char_data: Path) -> None:
    """The real package, offline; its service is killed as soon as the run has begun."""
    program = (
        "import os, signal, sys, threading, train\n"
        "import engine.tracking as tracking\n"
        "start = tracking._start_wandb\n"
        "def started(*arguments):\n"
        "    run = start(*arguments)\n"
        "    children = open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read().split()\n"
        "    for child in children: os.kill(int(child), signal.SIGKILL)\n"
        "    print('killed', len(children), flush=True)\n"
        "    return run\n"
        "tracking._start_wandb = started\n"
        "train.main(sys.argv[1:])\n"
    )
    arguments = [f"--data_dir={char_data}", f"--out_dir={tmp_path / 'run'}", "--max_iters=6", "--wandb=offline", *TINY]
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)},
    )  # fmt: skip
    assert "killed 0" not in result.stdout and "killed" in result.stdout, result.stdout + result.stderr
    assert load_checkpoint(tmp_path / "run" / "last.pt")["step"] == 6, result.stderr[-2000:]
    assert "sample from it with" in result.stdout, result.stdout + result.stderr[-2000:]


# --- Disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [0, 10, 3000])
def test_T20_a_disk_that_fills_up_at_any_point_of_a_checkpoint_leaves_the_earlier_one(
    written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"model": {"weight": torch.randn(50, 50)}}
    save_checkpoint(tmp_path / "last.pt", {**content, "step": 1})
    before = (tmp_path / "last.pt").read_bytes()
    fsync, room = os.fsync, {"left": written}

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            room["left"] -= len(data)
            if room["left"] < 0:
                raise OSError(28, "No space left on device")
            return self.file.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    @contextlib.contextmanager
    def limited(path: Path) -> Any:
        with written_whole(path) as file:
            yield Full(file)

    monkeypatch.setattr("engine.checkpoint.written_whole", limited)
    with pytest.raises(UserError, match=r"cannot be written.*an earlier checkpoint there is intact"):
        save_checkpoint(tmp_path / "last.pt", {**content, "step": 2})
    assert (tmp_path / "last.pt").read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    assert os.fsync is fsync


# --- Memory -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read as Linux tells it")
def test_T17_resuming_takes_no_more_memory_than_beginning_did(char_data: Path, tmp_path: Path) -> None:
    """12.6 million parameters: 50 MB of weights, 100 MB of moments, which a copy left over would add again."""
    program = (
        "import sys, train; train.main(sys.argv[1:]);"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    shape = [*TINY, "--n_layer=4", "--n_embd=512", "--batch_size=1", "--block_size=8", "--eval_interval=1000"]
    peaks = []
    for arguments in (["--max_iters=2"], ["--max_iters=4", "--resume"]):
        command = [sys.executable, "-c", program, f"--data_dir={char_data}", f"--out_dir={tmp_path / 'run'}"]
        result = subprocess.run(
            [*command, *shape, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        peaks.append(int(result.stdout.splitlines()[-1]) / 1024)
    assert peaks[1] < peaks[0] + 40, peaks


def test_T17_the_checkpoint_is_on_the_cpu_and_let_go_of_before_training(
    here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_on(char_data, "run", "--max_iters=2").status == 0
    loaded: list[weakref.ref[torch.Tensor]] = []
    real_load, real_train = engine.run.load_checkpoint, train.train

    def load(path: Path, **named: bool) -> dict[str, Any]:
        content = real_load(path, **named)
        assert {tensor.device.type for tensor in content["model"].values()} == {"cpu"}
        loaded.extend(weakref.ref(tensor) for tensor in content["model"].values())
        return content

    def training(*arguments: Any) -> None:
        assert loaded and not any(reference() is not None for reference in loaded)
        real_train(*arguments)

    monkeypatch.setattr(engine.run, "load_checkpoint", load)
    monkeypatch.setattr(train, "train", training)
    outcome = train_on(char_data, "run", "--max_iters=4", "--resume")
    assert outcome.status == 0, outcome.stderr
