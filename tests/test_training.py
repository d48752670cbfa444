"""Training: what it logs, saves and refuses, and that it goes on exactly where it stopped."""

import json
import math
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.device
import train
from config.schema import TrainSettings
from data.dataset import PreparedData
from engine.checkpoint import load_checkpoint, model_from_checkpoint
from engine.device import peak_flops
from engine.signals import StopSignals
from engine.step_log import StepLog
from model import GPTConfig
from tests.conftest import REPOSITORY, TEXT, TINY, Outcome, assert_clean_error, run_prepare, run_train, script
from tests.several import as_process


def metrics(folder: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path | str) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(folder) if "loss" in line}


def train_on(data: Path, out_dir: str, *arguments: str) -> Outcome:
    outcome = run_train(f"--data_dir={data}", f"--out_dir={out_dir}", "--log_interval=1", *TINY, *arguments)
    assert outcome.status == 0, outcome.stderr
    return outcome


def weights(folder: str | Path, name: str = "last.pt") -> dict[str, torch.Tensor]:
    return load_checkpoint(Path(folder) / name, lazily=False)["model"]


def assert_same_weights(one: str, other: str) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


# --- What a run says and writes ------------------------------------------------------------------------------------


def test_T18_the_log_starts_with_a_plain_summary(here: Path, char_data: Path) -> None:
    data = PreparedData(char_data)
    outcome = train_on(char_data, "run", "--max_iters=10", "--eval_interval=5")
    size = data.tokenizer.vocab_size
    tokens = 10 * 4 * 32
    for words in (
        f"{load_parameters('run'):,} parameters",
        f"{data.metadata.train_tokens:,} tokens to train on",
        f"{data.metadata.val_tokens:,} for validation",
        f"{tokens:,} tokens, {tokens / data.metadata.train_tokens:.2f} passes over the data",
        "cpu (", "float32 (as asked)", f"ln({size}) = {math.log(size):.2f}",
    ):  # fmt: skip
        assert words in outcome.stdout, (words, outcome.stdout)
    assert losses("run")[1] == pytest.approx(math.log(size), abs=0.3)
    assert losses("run")[10] < losses("run")[1]


def load_parameters(folder: str) -> int:
    return sum(tensor.numel() for name, tensor in weights(folder).items() if not name.endswith("scale"))


def test_L04_metrics_are_one_line_a_step_with_every_number(here: Path, char_data: Path) -> None:
    train_on(char_data, "run", "--max_iters=7", "--eval_interval=3")
    lines = metrics("run")
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == list(range(1, 8))
    assert all(
        set(line) == {"step", "loss", "gradient_norm", "learning_rate", "tokens_per_second", "tokens"}
        for line in training
    )
    assert [line["tokens"] for line in training] == [step * 128 for step in range(1, 8)]
    validation = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in validation] == [3, 6, 7]
    for line in validation:
        assert line["val_perplexity"] == pytest.approx(math.exp(line["val_loss"]))
        assert line["val_bits_per_byte"] == pytest.approx(line["val_loss"] / math.log(2), rel=0.05)


def test_L04_a_resumed_run_appends_without_duplicates(here: Path, char_data: Path) -> None:
    train_on(char_data, "run", "--max_iters=6", "--eval_interval=4", "--lr_decay=constant")
    with (here / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": 1.0}\n{"step": 10, "lo')  # written after the last checkpoint, then cut off
    train_on(char_data, "run", "--resume", "--max_iters=9")
    steps = [line["step"] for line in metrics("run") if "loss" in line]
    assert steps == list(range(1, 10))


def test_L04_unreadable_lines_are_dropped_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n[]\n{"step": 2}\n{"step": 3}\n{"st')
    StepLog(path, last_step=2).write({"step": 3, "loss": 1.5})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_the_resolved_settings_lie_beside_the_run_and_start_the_same_run_again(here: Path, char_data: Path) -> None:
    train_on(char_data, "run", "--max_iters=5", "--learning_rate=0.01")
    again = run_train("run/settings.toml", "--out_dir=again")
    assert again.status == 0, again.stderr
    assert losses("run") == losses("again")
    assert_same_weights("run", "again")


@pytest.mark.parametrize("max_iters", [0, 1, 10])
def test_T15_exactly_as_many_updates_as_asked(
    max_iters: int, here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = []
    real = train.update
    monkeypatch.setattr(train, "update", lambda *a: updates.append(1) or real(*a))
    train_on(char_data, "run", f"--max_iters={max_iters}", "--eval_interval=100")
    assert len(updates) == max_iters and load_checkpoint(here / "run" / "last.pt")["step"] == max_iters
    before = (here / "run" / "last.pt").read_bytes()
    outcome = train_on(char_data, "run", "--resume")
    assert len(updates) == max_iters and "nothing to do" in outcome.stdout
    assert (here / "run" / "last.pt").read_bytes() == before


def test_T20_a_final_checkpoint_exists_and_best_and_last_are_told_apart(here: Path, char_data: Path) -> None:
    train_on(char_data, "run", "--max_iters=15", "--eval_interval=100")
    assert load_checkpoint(here / "run" / "last.pt")["step"] == 15
    train_on(char_data, "wild", "--max_iters=12", "--eval_interval=4", "--learning_rate=0.3", "--lr_decay=constant")
    validation = {line["step"]: line["val_loss"] for line in metrics("wild") if "val_loss" in line}
    best = load_checkpoint(here / "wild" / "best.pt")
    assert best["step"] == min(validation, key=validation.__getitem__) and best["best_loss"] == min(validation.values())
    assert load_checkpoint(here / "wild" / "last.pt")["step"] == 12
    assert "optimizer" not in best, "to sample from, at a third of the size"


def test_patience_stops_after_so_many_validations_without_a_better_one(here: Path, char_data: Path) -> None:
    outcome = train_on(
        char_data, "run", "--max_iters=100", "--eval_interval=2", "--patience=3", "--learning_rate=0", "--min_lr=0"
    )
    assert load_checkpoint(here / "run" / "last.pt")["step"] == 8  # the first at 2 is the best, then 4, 6, 8
    assert "stopped early at step 8" in outcome.stdout + outcome.stderr
    before = (here / "run" / "last.pt").read_bytes()
    assert "nothing to do" in train_on(char_data, "run", "--resume").stdout
    assert (here / "run" / "last.pt").read_bytes() == before
    train_on(char_data, "run", "--resume", "--patience=5", "--learning_rate=0")
    assert load_checkpoint(here / "run" / "last.pt")["step"] == 12


# --- The same training, however it is cut --------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(
    optimizer: str, dtype: str, here: Path, char_data: Path
) -> None:
    arguments = (f"--optimizer={optimizer}", f"--dtype={dtype}", "--dropout=0.2", "--gradient_accumulation_steps=2",
                 "--lr_decay_iters=12", "--eval_interval=5")  # fmt: skip
    train_on(char_data, "whole", "--max_iters=12", *arguments)
    train_on(char_data, "parts", "--max_iters=4", *arguments)
    for max_iters in (7, 12):
        torch.manual_seed(max_iters)  # a new process would not have the random state of this one
        train_on(char_data, "parts", "--resume", f"--max_iters={max_iters}", *arguments)
    assert losses("whole") == losses("parts")
    assert_same_weights("whole", "parts")


def test_E02_how_often_is_evaluated_never_changes_training(here: Path, char_data: Path) -> None:
    for interval in (1, 5, 50):
        train_on(char_data, str(interval), "--max_iters=12", "--dropout=0.3", f"--eval_interval={interval}")
    assert losses("1") == losses("5") == losses("50")
    assert_same_weights("1", "50")


def test_T09_accumulation_gives_the_gradients_and_the_loss_of_the_whole_batch(here: Path, char_data: Path) -> None:
    common = ("--max_iters=1", "--learning_rate=0.1", "--grad_clip=0.5", "--warmup_iters=0", "--optimizer=adamw")
    train_on(char_data, "whole", "--batch_size=8", *common)
    train_on(char_data, "parts", "--batch_size=4", "--gradient_accumulation_steps=2", *common)
    one, other = (next(line for line in metrics(name) if "loss" in line) for name in ("whole", "parts"))
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
    assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], abs=1e-6)
    assert one["tokens"] == other["tokens"] == 8 * 32
    first, second = (load_checkpoint(here / name / "last.pt")["optimizer"][0]["state"] for name in ("whole", "parts"))
    for index in first:  # after one step AdamW's first moment is the clipped gradient, scaled
        torch.testing.assert_close(first[index]["exp_avg"], second[index]["exp_avg"], atol=1e-6, rtol=0)


def test_clipping_limits_the_gradient_and_zero_leaves_it(here: Path, char_data: Path) -> None:
    def moment_norm(out_dir: str, clip: str) -> tuple[float, float]:
        train_on(char_data, out_dir, "--max_iters=1", "--warmup_iters=0", f"--grad_clip={clip}")
        state = load_checkpoint(here / out_dir / "last.pt")["optimizer"][0]["state"]
        norm = math.sqrt(sum(part["exp_avg"].square().sum().item() for part in state.values())) / (1 - 0.9)
        return norm, metrics(out_dir)[0]["gradient_norm"]

    clipped, reported = moment_norm("clipped", "0.01")
    assert clipped == pytest.approx(0.01, rel=1e-3) and reported > 0.1
    free, reported = moment_norm("free", "0")
    assert free == pytest.approx(reported, rel=1e-3)


def test_K06_a_run_trained_with_one_attention_path_goes_on_with_the_other(here: Path, char_data: Path) -> None:
    train_on(char_data, "run", "--max_iters=4", "--attention_impl=manual", "--lr_decay=constant")
    train_on(char_data, "run", "--resume", "--max_iters=8", "--attention_impl=sdpa")
    train_on(char_data, "straight", "--max_iters=8", "--attention_impl=manual", "--lr_decay=constant")
    for step, loss in losses("straight").items():
        assert losses("run")[step] == pytest.approx(loss, abs=1e-4)
    assert load_checkpoint(here / "run" / "last.pt")["settings"]["attention_impl"] == "sdpa"


def test_T06_when_compiling_fails_training_goes_on_without(
    here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model: torch.nn.Module) -> Any:
        def call(*arguments: object, **named: object) -> None:
            raise RuntimeError("no C++ compiler\nmany\nlines")

        return call

    monkeypatch.setattr(torch, "compile", failing)
    outcome = train_on(char_data, "compiled", "--max_iters=5", "--compile")
    assert "no C++ compiler" in outcome.stderr and "going on without" in outcome.stderr
    assert "many" not in outcome.stderr
    train_on(char_data, "eager", "--max_iters=5")
    assert losses("compiled") == losses("eager")


# --- Refusals ------------------------------------------------------------------------------------------------------


def test_a_new_run_never_overwrites_an_old_one(here: Path, char_run: Path, char_data: Path) -> None:
    before = (char_run / "last.pt").read_bytes()
    outcome = run_train(f"--data_dir={char_data}", f"--out_dir={char_run}", *TINY)
    assert_clean_error(outcome, str(char_run), "--resume", "--out_dir")
    assert (char_run / "last.pt").read_bytes() == before


OWN = ["settings.toml", "metrics.jsonl", "samples.jsonl", "loss.png", "report.html", "best.pt"]


@pytest.mark.parametrize("name", OWN)
def test_files_of_the_user_in_a_run_directory_are_never_replaced(name: str, here: Path, char_data: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / name).write_text("precious = 1")
    assert_clean_error(run_train(f"--data_dir={char_data}", "--out_dir=run", *TINY, "--max_iters=1"), name, "--out_dir")
    assert (here / "run" / name).read_text() == "precious = 1"


def test_a_run_that_ended_before_it_saved_may_be_begun_again(here: Path, char_data: Path) -> None:
    train_on(char_data, "run", "--max_iters=1")
    for name in ("last.pt", "best.pt"):
        (here / "run" / name).unlink()
    train_on(char_data, "run", "--max_iters=2")
    assert load_checkpoint(here / "run" / "last.pt")["step"] == 2


def test_data_that_was_moved_may_be_named_on_resuming(here: Path) -> None:
    (here / "text.txt").write_text(TEXT)
    assert run_train("--text=text.txt", "--tokenizer=char", "--out_dir=run", *TINY, "--max_iters=2").status == 0
    [folder] = (here / "prepared").iterdir()
    folder.rename(here / "moved")
    outcome = run_train("--out_dir=run", "--resume", "--max_iters=3", "--data_dir=moved")
    assert outcome.status == 0, outcome.stderr


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100000], ids=["no text", "deep"])
def test_L04_a_metrics_file_that_was_damaged_does_not_stop_a_run(content: bytes, here: Path, char_data: Path) -> None:
    train_on(char_data, "run", "--max_iters=2")
    (here / "run" / "metrics.jsonl").write_bytes(content)
    train_on(char_data, "run", "--resume", "--max_iters=4")
    assert [line["step"] for line in metrics("run") if "loss" in line] == [3, 4]


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["optimizer"][0]["state"][0].update(exp_avg=torch.zeros(3)),
        lambda c: c["optimizer"][0].update(state=None),
        lambda c: c.update(best_loss="x"),
        lambda c: c.pop("wandb_id"),
        lambda c: c["model_config"].update(n_head=4),
        lambda c: c["settings"].update({5: 1}),
        lambda c: c["settings"].pop("block_size"),
    ],
)
def test_K08_a_checkpoint_with_impossible_state_is_refused(change: Any, here: Path, char_data: Path) -> None:
    train_on(char_data, "run", "--max_iters=2")
    content = load_checkpoint(here / "run" / "last.pt", lazily=False)
    change(content)
    torch.save(content, here / "run" / "last.pt")
    assert_clean_error(run_train("--out_dir=run", "--resume", "--max_iters=4"), "")


def test_resuming_where_there_is_no_run_is_refused(here: Path) -> None:
    assert_clean_error(run_train("--resume", "--out_dir=nowhere"), "nowhere/last.pt", "no such checkpoint")


def test_K08_a_checkpoint_without_optimizer_state_is_refused_for_resuming(here: Path, char_data: Path) -> None:
    train_on(char_data, "run", "--max_iters=2", "--eval_interval=2")
    (here / "run" / "best.pt").replace(here / "run" / "last.pt")
    assert_clean_error(run_train("--resume", "--out_dir=run"), "last.pt", "sampled from")


@pytest.mark.parametrize(
    "change",
    [
        "--n_layer=2",
        "--n_embd=32",
        "--block_size=16",
        "--bias=false",
        "--position=rotary",
        "--norm_placement=pre",
        "--optimizer=muon",
    ],
)
def test_K05_an_architecture_that_the_weights_do_not_have_is_refused_with_both_values(
    change: str, here: Path, char_data: Path
) -> None:
    train_on(char_data, "run", "--max_iters=2")
    name, value = change.lstrip("-").split("=")
    saved = load_checkpoint(here / "run" / "last.pt")["settings"][name]
    assert_clean_error(
        run_train("--resume", "--out_dir=run", change),
        name,
        f"{name} = {saved}",
        value.capitalize() if value == "false" else value,
    )


def test_a_preset_beside_resume_changes_nothing_that_the_run_was_given(here: Path, char_data: Path) -> None:
    (here / "mine.toml").write_text("learning_rate = 0.001\nn_head = 1\ntext = 'stdlib'\n")
    arguments = ("mine.toml", f"--data_dir={char_data}", "--out_dir=run", *TINY, "--learning_rate=0.004")
    assert run_train(*arguments, "--max_iters=2").status == 0
    outcome = run_train("mine.toml", "--out_dir=run", "--resume", "--max_iters=4")
    assert outcome.status == 0, outcome.stderr
    saved = load_checkpoint(here / "run" / "last.pt")
    assert (saved["step"], saved["settings"]["learning_rate"], saved["settings"]["n_head"]) == (4, 0.004, 2)
    assert saved["settings"]["data_dir"] == str(char_data) and "text" not in saved["settings"]


def test_weight_decay_and_betas_given_on_resuming_take_effect(here: Path, char_data: Path) -> None:
    for name, change in (("same", ()), ("more", ("--weight_decay=0.9",)), ("other", ("--beta1=0.5",))):
        train_on(char_data, name, "--max_iters=2", "--lr_decay=constant", "--learning_rate=0.01")
        train_on(char_data, name, "--resume", "--max_iters=4", *change)
    assert losses("same")[4] != losses("more")[4] and losses("same")[4] != losses("other")[4]


@pytest.mark.parametrize("change", ["--tokenizer=byte", "--val_fraction=0.3", "--vocab_size=999", "--parse_special"])
def test_V02_another_preparation_asked_for_on_resuming_is_refused(change: str, here: Path) -> None:
    (here / "text.txt").write_text(TEXT)
    arguments = ("--text=text.txt", "--out_dir=run", *TINY)
    assert run_train(*arguments, "--tokenizer=char", "--max_iters=2").status == 0
    name = change.lstrip("-").split("=")[0]
    assert_clean_error(run_train(*arguments, "--resume", "--max_iters=4", change), f"{name} = ", "was made with")


def test_what_is_given_on_resuming_is_checked_beside_the_saved_settings(here: Path, char_data: Path) -> None:
    train_on(char_data, "run", "--max_iters=2", "--learning_rate=0.5")
    outcome = run_train("--resume", "--out_dir=run", "--max_iters=3", "--min_lr=0.1")  # above the default rate
    assert outcome.status == 0, outcome.stderr
    assert_clean_error(
        run_train("--resume", "--out_dir=run", "--min_lr=0.6"), "min_lr = 0.6 is above learning_rate = 0.5"
    )


def test_what_may_change_on_resuming_does_and_is_recorded(here: Path, char_data: Path) -> None:
    train_on(char_data, "run", "--max_iters=2")
    outcome = run_train(
        "--resume", "--out_dir=run", "--max_iters=4", "--learning_rate=0.002", "--batch_size=2", "--dropout=0.1"
    )
    assert outcome.status == 0, outcome.stderr
    saved = load_checkpoint(here / "run" / "last.pt")
    assert (saved["step"], saved["settings"]["learning_rate"], saved["settings"]["batch_size"]) == (4, 0.002, 2)
    assert saved["model_config"]["dropout"] == 0.1 and "batch_size = 2" in (here / "run" / "settings.toml").read_text()


@pytest.mark.parametrize(("tokenizer", "text"), [("byte", TEXT), ("char", TEXT + "한"), ("bpe", TEXT)])
def test_V02_data_made_with_another_tokenizer_is_refused_and_both_are_named(
    tokenizer: str, text: str, here: Path, char_data: Path
) -> None:
    train_on(char_data, "run", "--max_iters=2")
    (here / "text.txt").write_text(text, encoding="utf-8")
    assert run_prepare("text.txt", f"--tokenizer={tokenizer}", "--vocab_size=300", "--out_dir=other").status == 0
    before = (here / "run" / "last.pt").read_bytes()
    other = PreparedData(here / "other").metadata
    outcome = run_train("--resume", "--out_dir=run", "--data_dir=other", "--max_iters=4")
    assert_clean_error(outcome, "other", f"{tokenizer} with {other.vocab_size} ids", "char with")
    assert (here / "run" / "last.pt").read_bytes() == before


def test_V02_other_tokens_of_the_same_tokenizer_are_refused_too(here: Path, char_data: Path) -> None:
    train_on(char_data, "run", "--max_iters=2")
    (here / "text.txt").write_text(TEXT[::-1])
    assert run_prepare("text.txt", "--tokenizer=char", "--out_dir=other").status == 0
    assert_clean_error(run_train("--resume", "--out_dir=run", "--data_dir=other"), "train_sha256", "those of the run")


def test_V02_a_text_edited_since_does_not_stand_in_the_way_of_resuming(here: Path) -> None:
    (here / "text.txt").write_text(TEXT)
    arguments = ("--text=text.txt", "--tokenizer=char", "--out_dir=run", *TINY)
    assert run_train(*arguments, "--max_iters=2").status == 0
    (here / "text.txt").write_text(TEXT + "And more.")
    outcome = run_train(*arguments, "--resume", "--max_iters=4")
    assert outcome.status == 0, outcome.stderr
    assert load_checkpoint(here / "run" / "last.pt")["step"] == 4


def test_T01_training_that_diverges_stops_and_keeps_the_last_finite_checkpoint(
    here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = train.update

    def breaking(run: Any, forward: Any, batches: Any, step: int, dtype: Any) -> Any:
        if step == 10:
            with torch.no_grad():
                next(run.model.parameters()).fill_(float("nan"))
        return real(run, forward, batches, step, dtype)

    monkeypatch.setattr(train, "update", breaking)
    outcome = run_train(
        f"--data_dir={char_data}", "--out_dir=run", *TINY, "--max_iters=50", "--eval_interval=5", "--log_interval=1"
    )
    assert_clean_error(outcome, "step 11", "loss is nan", "last.pt", "--learning_rate")
    for name in ("last.pt", "best.pt"):
        assert all(torch.isfinite(value).all() for value in weights("run", name).values())
    assert load_checkpoint(here / "run" / "last.pt")["step"] == 10


@pytest.mark.parametrize("ended_by", ["an evaluation without validation", "a sample", "a signal"])
def test_T01_broken_weights_are_never_saved_even_between_two_log_lines(
    ended_by: str, here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = train.update

    def breaking(run: Any, forward: Any, batches: Any, step: int, dtype: Any) -> Any:
        result = real(run, forward, batches, step, dtype)
        if step == (12 if ended_by == "a signal" else 13):
            with torch.no_grad():
                next(run.model.parameters()).fill_(float("nan"))
            if ended_by == "a signal":
                signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(train, "update", breaking)
    if ended_by == "a signal":
        data = str(char_data)
    else:
        (here / "text.txt").write_text(TEXT)
        assert run_prepare("text.txt", "--tokenizer=char", "--val_fraction=0", "--out_dir=data").status == 0
        data = "data"
    intervals = ("--max_iters=90", "--eval_interval=7", "--log_interval=40")
    sampled = f"--sample_tokens={8 if ended_by == 'a sample' else 0}"
    outcome = run_train(f"--data_dir={data}", "--out_dir=run", *TINY, *intervals, sampled)
    found = "the logits are not finite" if ended_by == "a sample" else "a weight is not finite"
    assert_clean_error(outcome, found, "earlier, finite state")
    saved = load_checkpoint(here / "run" / "last.pt")
    assert saved["step"] == 7 and all(torch.isfinite(value).all() for value in saved["model"].values())


def test_a_disk_that_fills_up_is_a_clean_error_and_the_last_checkpoint_stays(
    here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.save

    def full(content: dict[str, Any], file: Any) -> None:
        if content["step"] < 10:
            return real(content, file)
        file.write(b"half of it")
        raise RuntimeError("[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full)
    outcome = run_train(f"--data_dir={char_data}", "--out_dir=run", *TINY, "--max_iters=20", "--eval_interval=5")
    assert_clean_error(outcome, "last.pt: cannot be written", "intact")
    assert load_checkpoint(here / "run" / "last.pt")["step"] == 5
    assert sorted(path.name for path in (here / "run").iterdir()) == [
        ".lock",
        "best.pt",
        "last.pt",
        "metrics.jsonl",
        "samples.jsonl",
        "settings.toml",
    ]


def test_out_of_memory_is_a_clean_error(here: Path, char_data: Path) -> None:
    outcome = run_train(f"--data_dir={char_data}", "--out_dir=run", *TINY, "--n_embd=1e9", "--max_iters=1")
    assert_clean_error(outcome, "out of memory", "--batch_size")


def test_a_text_of_ones_own_gets_a_run_of_its_own(here: Path) -> None:
    """The README's first command, after the demo has left its run beside it."""
    (here / "preset.toml").write_text("text = 'first.txt'\ntokenizer = 'char'\nmax_iters = 1\n")
    for name in ("first.txt", "my text.v2.txt"):
        (here / name).write_text(TEXT)
    (here / "many").mkdir()
    (here / "many" / "a.txt").write_text(TEXT)
    for arguments, folder in (
        (["preset.toml"], "preset"),
        (["preset.toml", "--text=my text.v2.txt"], "my_text_v2"),
        (["preset.toml", "--text=many/*.txt"], "text"),
        (["preset.toml", "--text=many"], "many"),
    ):
        outcome = run_train(*arguments, *TINY)
        assert outcome.status == 0, outcome.stderr
        assert (here / "runs" / folder / "last.pt").exists(), sorted((here / "runs").iterdir())
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["many", "my_text_v2", "preset", "text"]


def test_an_unwritable_run_directory_is_a_clean_error(here: Path, char_data: Path) -> None:
    (here / "file").touch()
    assert_clean_error(run_train(f"--data_dir={char_data}", "--out_dir=file/run", *TINY), "file/run", "--out_dir")


# --- Devices -------------------------------------------------------------------------------------------------------


def test_T04_without_a_gpu_and_without_a_word_it_runs_on_the_cpu_and_says_so(tmp_path: Path, char_data: Path) -> None:
    shape = [argument for argument in TINY if not argument.startswith(("--device", "--dtype"))]
    outcome = script("train.py", f"--data_dir={char_data}", "--out_dir=run", "--max_iters=2", *shape,
                     cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})  # fmt: skip
    assert outcome.status == 0, outcome.stderr
    assert "device      cpu (" in outcome.stdout and "(auto: " in outcome.stdout


def test_T04_no_cuda_call_is_made_when_the_device_is_the_cpu(
    here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*arguments: object, **options: object) -> None:
        raise AssertionError("CUDA was asked")

    for name in ("is_available", "device_count", "get_device_capability", "get_device_name", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    train_on(char_data, "run", "--max_iters=2", "--dropout=0.1")


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps"])
def test_T04_a_device_that_is_not_there_is_refused(device: str, here: Path, char_data: Path) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("there is one")
    outcome = run_train(f"--data_dir={char_data}", "--out_dir=run", f"--device={device}", "--n_embd=8", "--n_head=1")
    assert_clean_error(outcome, f"device = {device}", "--device=auto")


def test_T03_an_older_gpu_falls_back_to_float16_and_an_explicit_request_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old GPU")
    cuda = torch.device("cuda")
    assert engine.device.choose_dtype("auto", cuda, training=True) == (torch.float16, "auto: this GPU lacks bfloat16")
    with pytest.raises(Exception, match="an old GPU lacks it"):
        engine.device.choose_dtype("bfloat16", cuda, training=True)


def test_T02_float16_without_a_loss_scaler_is_refused(here: Path, char_data: Path) -> None:
    shape = [argument for argument in TINY if not argument.startswith("--dtype")]
    outcome = run_train(f"--data_dir={char_data}", "--out_dir=run", "--dtype=float16", *shape)
    assert_clean_error(outcome, "dtype = float16", "bfloat16")


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_takes_bfloat16_only_where_the_processor_has_it(
    native: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native})
    assert engine.device.choose_dtype("auto", torch.device("cpu"), training=True)[0] == expected
    assert engine.device.choose_dtype("auto", torch.device("cpu"), training=False)[0] == torch.float32


# --- wandb and signals ---------------------------------------------------------------------------------------------


def test_L01_without_the_wandb_package_runs_work_until_it_is_asked_for(
    here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it now fails
    train_on(char_data, "off", "--max_iters=1")
    outcome = run_train(f"--data_dir={char_data}", "--out_dir=on", *TINY, "--max_iters=1", "--wandb=offline")
    assert_clean_error(outcome, "wandb", "pip install wandb", "--wandb=disabled")


def test_L01_disabled_never_imports_wandb(tmp_path: Path, char_data: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import train\n"
        f"train.main(['--data_dir={char_data}', '--out_dir=run', '--max_iters=1', *{TINY!r}])\n"
        "print('wandb' in sys.modules, 'matplotlib' in sys.modules, 'tiktoken' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[-1] == "False False False", result.stderr


def test_L02_L03_an_offline_run_needs_no_account_and_is_resumed_under_its_id(
    here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    train_on(char_data, "run", "--max_iters=2", "--wandb=offline")
    first = load_checkpoint(here / "run" / "last.pt")["wandb_id"]
    train_on(char_data, "run", "--resume", "--max_iters=4")
    assert first and load_checkpoint(here / "run" / "last.pt")["wandb_id"] == first


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_K07_a_signal_saves_says_how_to_go_on_and_exits(
    number: int, status: int, tmp_path: Path, char_data: Path
) -> None:
    arguments = [f"--data_dir={char_data}", "--out_dir=run", "--log_interval=1", "--eval_interval=100000", *TINY]
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "train.py"), *arguments, "--max_iters=100000"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (
        (tmp_path / "run" / "metrics.jsonl").exists() and len(metrics(tmp_path / "run")) > 5
    ):
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert "--out_dir=run --resume" in output
    step = load_checkpoint(tmp_path / "run" / "last.pt")["step"]
    assert step > 5
    result = script("train.py", "--out_dir=run", "--resume", f"--max_iters={step + 3}", cwd=tmp_path)
    assert result.status == 0, result.stderr
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == list(range(1, step + 4))


def test_K07_a_second_signal_exits_at_once() -> None:
    program = (
        "import os, signal, time\nfrom engine.signals import StopSignals\n"
        "with StopSignals() as signals:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.01); assert signals.received == signal.SIGINT\n"
        "    os.kill(os.getpid(), signal.SIGINT); time.sleep(5); print('still here')"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.returncode == 130 and result.stdout == "", result.stderr


def test_K07_under_torchrun_a_request_to_stop_may_come_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a cluster and from torchrun, of which neither knows of the other."""
    as_process(monkeypatch, 0, 2)
    left: list[int] = []
    monkeypatch.setattr("os._exit", left.append)
    with StopSignals() as signals:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM and not left


def test_every_setting_of_training_is_used_somewhere() -> None:
    """No dead options: each name is read from the settings, or belongs to the architecture or the preparation."""
    code = "".join(path.read_text() for path in (REPOSITORY / "train.py", *(REPOSITORY / "engine").glob("*.py")))
    code += (REPOSITORY / "data/preparation.py").read_text().replace("options.", "settings.")
    for name in TrainSettings.model_fields:
        assert re.search(rf"\b(settings|asked)\.{name}\b", code) or name in GPTConfig.__dataclass_fields__, name


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("Tesla T4", 65e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_P01_a_peak_is_only_known_of_devices_that_have_it(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert peak_flops(0.0, cuda, torch.bfloat16) == peak
    assert peak_flops(0.0, cuda, torch.float32) is None and peak_flops(0.0, cpu, torch.bfloat16) is None
    assert peak_flops(5e9, cuda, torch.float32) == peak_flops(5e9, cpu, torch.bfloat16) == 5e9


def test_P01_utilisation_is_shown_for_a_given_peak_and_never_otherwise(here: Path, char_data: Path) -> None:
    silent = train_on(char_data, "silent", "--max_iters=20")
    shown = train_on(char_data, "shown", "--max_iters=20", "--peak_flops=1e12")
    assert "of peak" not in silent.stderr and "of peak" in shown.stderr
    assert not any("mfu" in line for line in metrics(here / "silent"))
    line = next(line for line in metrics(here / "shown") if line["step"] == 20 and "loss" in line)
    model = model_from_checkpoint(load_checkpoint(here / "shown" / "last.pt"), here)
    # 4,464 parameters less 32 x 16 of the position table, and attention's 12 x layers x width x context.
    operations = model.config.operations_per_token
    assert operations == 6 * (model.parameter_count() - 512) + 12 * 1 * 16 * 32
    assert line["mfu"] == pytest.approx(line["tokens_per_second"] * operations / 1e12, rel=1e-3)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked")
def test_memory_that_was_freed_is_used_again_without_being_cleared() -> None:
    """Each page that the system has to clear is a fault: 32 MB are 8,192 of them."""
    program = (
        "import resource, sys, torch\nfrom engine.device import keep_freed_memory\n"
        "if sys.argv[1] == 'kept': keep_freed_memory()\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(10): torch.zeros(8 << 20)\n"
        "before = faults()\n"
        "for _ in range(10): torch.zeros(8 << 20)\n"
        "print(faults() - before)"
    )
    faults = {}
    for how in ("kept", "given back"):
        command = [sys.executable, "-c", program, how]
        result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        faults[how] = int(result.stdout)
    assert faults["kept"] < 10_000 < 50_000 < faults["given back"], faults


def test_training_does_not_import_the_compiler_unless_it_compiles(char_data: Path, tmp_path: Path) -> None:
    program = "import sys, train; train.main(sys.argv[1:]); print('torch._dynamo' in sys.modules)"
    arguments = [f"--data_dir={char_data}", f"--out_dir={tmp_path / 'run'}", "--max_iters=2", "--optimizer=muon", *TINY]
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[-1] == "False", result.stdout + result.stderr
