"""One model shared out over several processes (FSDP): by gloo, on the CPU."""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import sharding
from engine.checkpoint import load_checkpoint
from engine.step_log import read_step_log
from tests.conftest import TEXT, Outcome, assert_clean_error, call, run_prepare, run_sample, run_train
from tests.several import SHARED, assert_same_weights, changed, program, torchrun

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="gloo is tried on Linux")

# Muon orthogonalizes in bfloat16, where a last bit of a gradient becomes a hundredth of an update.
TOLERANCE = {"adamw": 1e-6, "muon": 5e-5}
# 18 rows cannot be shared evenly by 4, nor two layers' matrices; gradients are clipped in every update.
UNEVEN = (
    *SHARED, "--n_embd=18", "--n_layer=2", "--grad_clip=0.2", "--max_iters=6", "--eval_interval=2",
    "--sample_tokens=20",
)  # fmt: skip
FSDP = "--parallel=fsdp"

# What a process holds before the third update, when there is all that there ever is.
TELLS = (
    "if step == 2:\n        import json, pathlib\n"
    "        own = lambda tensors: sum(t.to_local().numel() for t in tensors if t.dim())\n"
    "        states = [v for part in run.optimizer.parts for s in part.state.values() for v in s.values()]\n"
    "        held = {'weights': own(run.model.parameters()), 'states': own(states)}\n"
    "        pathlib.Path(run.out_dir, f'held{rank}.json').write_text(json.dumps(held))"
)


@dataclass
class Runs:
    """The same run on one process and, shared, on several; and what was printed, by optimizer and processes."""

    folder: Path
    said: dict[tuple[str, int], Outcome]

    def of(self, optimizer: str, processes: int) -> Path:
        return self.folder / f"{optimizer}{processes}"


@pytest.fixture(scope="module")
def runs(char_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("sharding"), {})
    script = changed(runs.folder, TELLS)
    for optimizer, processes in (("adamw", 1), ("muon", 1), ("muon", 2), ("adamw", 4)):
        options = [f"--data_dir={char_data}", *UNEVEN, FSDP, f"--optimizer={optimizer}"]
        options.append(f"--out_dir={runs.of(optimizer, processes)}")
        outcome = run_train(*options) if processes == 1 else torchrun(processes, *options, script=script)
        assert outcome.status == 0, outcome.stderr
        runs.said[optimizer, processes] = outcome
    return runs


SHARED_RUNS = pytest.mark.parametrize(("optimizer", "processes"), [("muon", 2), ("adamw", 4)])


@SHARED_RUNS
def test_T11_a_shared_model_learns_as_one_that_is_not(optimizer: str, processes: int, runs: Runs) -> None:
    """With dropout, accumulation, clipping and matrices that cannot be shared evenly."""
    one_run, other_run = runs.of(optimizer, 1), runs.of(optimizer, processes)
    alone, together = (read_step_log(run / "metrics.jsonl") for run in (one_run, other_run))
    assert len(alone) == len(together) == 9
    for one, other in zip(alone, together, strict=True):
        assert one.keys() == other.keys() and one.get("tokens") == other.get("tokens")
        assert one.get("gradient_norm", 1.0) > 0.2, "clipping had nothing to do"
        for name in ("loss", "gradient_norm", "val_loss", "val_bits_per_byte", "val_tokens"):
            if name in one:
                assert other[name] == pytest.approx(one[name], abs=1e-6, rel=1e-6), name
    assert_same_weights(one_run, other_run, TOLERANCE[optimizer])
    assert read_step_log(one_run / "samples.jsonl") == read_step_log(other_run / "samples.jsonl")


@SHARED_RUNS
def test_every_process_holds_a_share_of_weights_and_optimizer_state(optimizer: str, processes: int, runs: Runs) -> None:
    files = [runs.of(optimizer, processes) / f"held{rank}.json" for rank in range(processes)]
    held = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    whole = load_checkpoint(runs.of(optimizer, 1) / "last.pt", lazily=False)
    states = [v for part in whole["optimizer"] for s in part["state"].values() for v in s.values() if v.dim()]
    for name, everything in (("weights", list(whole["model"].values())), ("states", states)):
        total = sum(tensor.numel() for tensor in everything if tensor.dim())
        assert sum(share[name] for share in held) == total
        assert max(share[name] for share in held) < 1.35 * total / processes, name


def test_T13_T14_of_a_shared_run_one_process_prints_and_all_write_their_shards(runs: Runs) -> None:
    said, folder = runs.said["muon", 2], runs.of("muon", 2)
    for word in ("2 processes (fsdp), the first on cpu", "best validation loss", "step 4: validation loss"):
        assert said.stdout.count(word) == 1, word
    assert "Warning" not in said.stderr and "alltoall" not in said.stderr, said.stderr
    names = {path.name for path in folder.iterdir() if not path.name.startswith("held")}
    shards = {name for name in names if ".shards-" in name}
    assert {name.split(".")[0] for name in shards} == {"best", "last"} and len(shards) == 2, "the old ones are gone"
    assert names - shards == {".lock", "best.pt", "last.pt", "metrics.jsonl", "samples.jsonl", "settings.toml"}
    for name in shards:
        assert len(list((folder / name).glob("*.distcp"))) == 2
    assert (folder / "last.pt").stat().st_size < (runs.of("muon", 1) / "last.pt").stat().st_size / 2


def test_one_process_alone_shares_with_nobody(runs: Runs) -> None:
    assert not list(runs.of("muon", 1).glob("*.shards-*")) and "fsdp" not in runs.said["muon", 1].stdout


@pytest.fixture(scope="module")
def begun(char_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The first two updates of the run, by one and by two processes."""
    folders = {processes: tmp_path_factory.mktemp("begun") / str(processes) for processes in (1, 2)}
    for processes, folder in folders.items():
        options = [
            f"--data_dir={char_data}",
            *UNEVEN,
            FSDP,
            f"--out_dir={folder}",
            "--max_iters=2",
            "--lr_decay_iters=6",
        ]
        outcome = run_train(*options) if processes == 1 else torchrun(processes, *options)
        assert outcome.status == 0, outcome.stderr
    return folders


@pytest.mark.parametrize(("begins", "ends"), [(2, 1), (2, 4), (1, 2)])
def test_K05_a_shared_run_goes_on_with_another_number_of_processes(
    begins: int, ends: int, begun: dict[int, Path], runs: Runs, tmp_path: Path
) -> None:
    shutil.copytree(begun[begins], tmp_path / "run")
    options = (f"--out_dir={tmp_path / 'run'}", "--resume", "--max_iters=6")
    outcome = run_train(*options) if ends == 1 else torchrun(ends, *options)
    assert outcome.status == 0, outcome.stderr
    straight = runs.of("muon", 1)
    assert_same_weights(tmp_path / "run", straight, TOLERANCE["muon"])
    alone, other = (read_step_log(folder / "metrics.jsonl") for folder in (straight, tmp_path / "run"))
    for name in ("loss", "val_loss"):
        assert [line[name] for line in other if name in line] == pytest.approx(
            [line[name] for line in alone if name in line], abs=1e-6
        )
    assert bool(list((tmp_path / "run").glob("*.shards-*"))) == (ends > 1)


def test_T01_weights_of_one_share_that_is_broken_are_saved_by_none(char_data: Path, tmp_path: Path) -> None:
    """Broken between the last update and the checkpoint, so that no loss has told the others."""
    weight = "run.model.blocks[0].feed_forward.expand.weight.to_local().data"
    script = program(
        tmp_path,
        "validate",
        "def changed(run, tracker, dtype):\n    result = real(run, tracker, dtype)\n"
        f"    if rank == 1 and run.progress.step == 4: {weight}.fill_(float('nan'))\n"
        "    return result\n",
    )
    options = (f"--data_dir={char_data}", f"--out_dir={tmp_path / 'run'}", *UNEVEN, "--sample_tokens=0", FSDP)
    outcome = torchrun(2, *options, script=script)
    assert outcome.status != 0 and outcome.stderr.count("step 4: a weight is not finite") == 1, outcome.stderr
    assert load_checkpoint(tmp_path / "run/last.pt")["step"] == 2


def test_in_bfloat16_a_shared_model_learns_as_whole_ones_do(char_data: Path, tmp_path: Path) -> None:
    """Norms and everything outside the blocks stay in float32, as autocast has it; compiled, too, and recomputing."""
    options = [f"--data_dir={char_data}", *UNEVEN, "--n_embd=24", "--position=rotary", "--norm_placement=pre"]
    losses, norms = {}, {}
    for name, extra in {
        "ddp": [],
        "fsdp": [FSDP, "--activation_checkpointing"],
        "compiled": [FSDP, "--compile", "--max_iters=2"],
    }.items():
        outcome = torchrun(2, *options, f"--out_dir={tmp_path / name}", "--dtype=bfloat16", *extra)
        assert outcome.status == 0 and "going on without" not in outcome.stderr, outcome.stderr
        lines = [line for line in read_step_log(tmp_path / name / "metrics.jsonl") if "loss" in line]
        losses[name], norms[name] = [line["loss"] for line in lines], lines[0]["gradient_norm"]
    assert norms["fsdp"] == pytest.approx(norms["ddp"], rel=1e-6), "gradients are summed in float32"
    assert losses["fsdp"] == pytest.approx(losses["ddp"], abs=2e-4)
    assert losses["compiled"] == pytest.approx(losses["ddp"][:2], abs=5e-3)


def test_a_shared_run_without_validation_is_sampled_from_while_it_trains(here: Path) -> None:
    """No validation has put the model together before."""
    (here / "text.txt").write_text(TEXT, encoding="utf-8")
    run_prepare("text.txt", "--tokenizer=char", "--val_fraction=0", f"--out_dir={here / 'data'}")
    options = (f"--data_dir={here / 'data'}", *UNEVEN, "--max_iters=2", FSDP)
    outcome = torchrun(2, *options, f"--out_dir={here / 'run'}")
    assert outcome.status == 0, outcome.stderr
    assert [sample["step"] for sample in read_step_log(here / "run/samples.jsonl")] == [2]


def test_a_shared_run_is_sampled_from_and_made_one_file(runs: Runs, tmp_path: Path) -> None:
    from engine import one_file

    here, shared = tmp_path / "run", runs.of("muon", 2)
    shutil.copytree(shared, here)
    options = (f"--out_dir={here}", "--max_new_tokens=20", "--prompt=Line")
    sampled = run_sample(*options)
    assert sampled.status == 0, sampled.stderr
    outcome = call(one_file.main, str(here))
    assert outcome.status == 0 and outcome.stdout.count("now one file") == 2, outcome.stderr
    assert not list(here.glob("*.shards-*"))
    raw: dict[str, Any] = torch.load(here / "last.pt", weights_only=True)
    assert "shards" not in raw and not any(tensor.is_meta for tensor in raw["model"].values())
    assert_same_weights(here, shared, 0.0)
    again = run_sample(*options)
    assert again.stdout == sampled.stdout
    assert call(one_file.main, str(here)).stdout.count("is one file") == 2
    assert_clean_error(call(one_file.main, str(tmp_path)), "holds no last.pt or best.pt")


def test_a_function_of_whole_matrices_gets_them_as_they_are_where_nothing_is_shared() -> None:
    matrices = torch.randn(2, 3, 4)
    assert sharding.on_whole_matrices(lambda given: given * 2, matrices).equal(matrices * 2)
    assert sharding.own_share(matrices) is matrices and sharding.whole(matrices) is matrices
