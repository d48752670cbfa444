"""What a training step will take: memory worked out beside memory measured, and that a rehearsal leaves no trace."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from config.schema import TrainSettings
from engine import rehearsal
from engine.checkpoint import load_checkpoint, save_checkpoint
from engine.device import resident_memory
from engine.rehearsal import duration, megabytes
from engine.step_log import read_step_log
from engine.step_memory import predicted_memory
from model import GPT
from tests.conftest import TINY, Outcome, assert_clean_error, run_train
from tests.several import as_process

MEDIUM = (
    "--n_layer=4", "--n_embd=128", "--n_head=4", "--block_size=128", "--batch_size=16", "--device=cpu",
    "--dtype=float32",
)  # fmt: skip
CPU = torch.device("cpu")


def rehearsed(data: Path, *argv: str) -> Outcome:
    outcome = run_train(f"--data_dir={data}", "--dry_run", *MEDIUM, *argv)
    assert outcome.status == 0, outcome.stderr
    return outcome


def figure(outcome: Outcome, pattern: str) -> float:
    found = re.search(pattern + r" ([\d,.]+)", outcome.stdout)
    assert found, outcome.stdout
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--attention_impl=sdpa", "--dropout=0.1", "--norm_placement=pre"),
        ("--dtype=bfloat16", "--optimizer=muon", "--position=rotary", "--gradient_accumulation_steps=3"),
        ("--activation_checkpointing",),
        ("--activation_checkpointing", "--dtype=bfloat16", "--attention_impl=sdpa"),
        ("--vocab_padding_multiple=30000", "--tied_head=false"),  # the loss in chunks
        ("--n_embd=512", "--batch_size=1"),  # weights and their optimizer state are most of it
    ],
    ids=" ".join,
)
def test_the_memory_of_a_step_is_what_was_predicted(options: tuple[str, ...], here: Path, char_data: Path) -> None:
    outcome = rehearsed(char_data, *options)
    expected, measured = figure(outcome, "peak +expected"), figure(outcome, "measured")
    assert expected == pytest.approx(measured, rel=0.15)
    assert expected == pytest.approx(measured, rel=0.05, abs=2), "it was within 2% on two cores of an AMD EPYC"


@pytest.mark.parametrize(("optimizer", "moments"), [("adamw", 2), ("muon", 1)])
def test_the_parts_are_those_of_the_model(optimizer: str, moments: int) -> None:
    settings = TrainSettings(n_layer=3, n_embd=64, n_head=4, block_size=32, batch_size=2, optimizer=optimizer)
    memory = predicted_memory(settings, 50, CPU, torch.float32)
    model = GPT(settings.gpt_config(50))
    numbers = model.parameter_count()
    hidden = sum(parameter.numel() for parameter in model.blocks.parameters() if parameter.dim() == 2)
    assert memory.parameters == pytest.approx(4 * numbers, abs=200)  # the scales come with them
    assert memory.gradients == 4 * numbers
    assert memory.optimizer == pytest.approx(
        4 * (2 * (numbers - hidden) + moments * hidden), abs=400
    )  # steps are counted
    assert memory.peak > memory.parameters + memory.optimizer + memory.activations


def test_what_is_kept_grows_with_the_batch_and_falls_to_the_blocks_inputs() -> None:
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "block_size": 64}
    one, two, less = (
        predicted_memory(TrainSettings(**sizes, **more), 50, CPU, torch.float32).activations  # type: ignore[arg-type]
        for more in ({"batch_size": 8}, {"batch_size": 16}, {"batch_size": 16, "activation_checkpointing": True})
    )
    assert two == pytest.approx(2 * one, rel=0.01)
    # A block keeps its input; the embedding, the last norm and the loss keep what they did.
    per_block = 16 * 64 * 64 * 4
    assert 4 * per_block < less < 8 * per_block and less < two / 5


def test_a_model_larger_than_this_machine_is_foreseen_without_memory_for_it() -> None:
    """Seven billion parameters: 28 GB of weights, 84 GB with gradients and one more moment."""
    before = resident_memory(peak=True) or 0
    settings = TrainSettings(
        n_layer=32, n_embd=4096, n_head=32, block_size=2048, batch_size=1, attention_impl="sdpa",
        activation_checkpointing=True, norm_placement="pre",
    )  # fmt: skip
    memory = predicted_memory(settings, 50257, CPU, torch.bfloat16)
    assert 26e9 < memory.parameters < 28e9 and memory.optimizer == pytest.approx(2 * memory.parameters, rel=0.01)
    assert (resident_memory(peak=True) or 0) - before < 500_000 * 1024


def test_more_than_is_free_is_refused_with_both_figures(
    here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "free_memory", lambda device: 20 * 2**20)
    outcome = run_train(f"--data_dir={char_data}", "--dry_run", *MEDIUM)
    assert_clean_error(outcome, "takes", "cpu has 20.0 MB free", "--batch_size", "--activation_checkpointing")
    assert not (here / "runs").exists()


def test_a_rehearsal_leaves_no_trace_and_disturbs_no_run(here: Path, char_data: Path, char_run: Path) -> None:
    run = here / "run"
    shutil.copytree(char_run, run)
    content = load_checkpoint(run / "last.pt", lazily=False)
    save_checkpoint(run / "last.pt", {**content, "is_best": True})
    (run / "best.pt").unlink()  # as between the two, while the run is training
    before = {path: path.read_bytes() for path in run.iterdir()}
    new, resumed = rehearsed(char_data, f"--out_dir={run}"), run_train(f"--out_dir={run}", "--resume", "--dry_run")
    for outcome in (new, resumed):
        assert outcome.status == 0, outcome.stderr
        assert (
            "update  " in outcome.stdout and "tokens/s" in outcome.stdout and "a pass over the data" in outcome.stdout
        )
    rehearsed(char_data, f"--out_dir={here / 'fresh'}", f"--init_from={char_run}", *TINY)
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    assert sorted(path.name for path in here.iterdir()) == ["run"]


def test_several_processes_are_told_that_it_is_for_one(char_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from config.errors import UserError
    from data.dataset import PreparedData

    as_process(monkeypatch, 0, 2)
    with pytest.raises(UserError, match="for one process"):
        rehearsal.foresee(TrainSettings(), PreparedData(char_data), CPU, torch.float32)


def test_figures_in_words() -> None:
    assert megabytes(3 * 2**19) == "1.5 MB"
    assert [duration(seconds) for seconds in (4.25, 90, 7200)] == ["4.2 s", "1.5 minutes", "2.0 hours"]


@pytest.mark.parametrize("options", [("--dtype=float32",), ("--dtype=bfloat16", "--optimizer=muon"), ("--compile",)])
def test_recomputing_activations_changes_no_bit(options: tuple[str, ...], here: Path, char_data: Path) -> None:
    """With dropout, whose pattern must come back."""
    for name, extra in (("kept", []), ("again", ["--activation_checkpointing"])):
        outcome = run_train(
            f"--data_dir={char_data}", f"--out_dir={name}", *MEDIUM, *TINY, "--dropout=0.2",
            "--max_iters=3", "--eval_interval=3", "--log_interval=1", *options, *extra,
        )  # fmt: skip
        assert outcome.status == 0 and "going on without" not in outcome.stderr, outcome.stderr
    one, other = (load_checkpoint(here / name / "last.pt", lazily=False)["model"] for name in ("kept", "again"))
    if "--compile" in options:  # other kernels, so only nearly
        assert all(torch.allclose(one[name], other[name], atol=1e-3) for name in one)
    else:
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert [line.get("loss") for line in read_step_log(here / "kept/metrics.jsonl")] == [
            line.get("loss") for line in read_step_log(here / "again/metrics.jsonl")
        ]
