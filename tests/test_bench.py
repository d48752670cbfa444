"""The benchmarks run, in miniature, and say what they measured and no more."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench.cases
import bench.gpu_check
import bench.peers
import bench.scaling
import bench.tables
from bench.cases import CASES, SMALL, time_cases_in_turn
from comparison.processes import CaseCall, measure_in_turn
from config.command_line import parse
from config.schema import TrainSettings
from model import GPT, GPTConfig


def test_A13_a_case_of_the_peers_runs_in_its_own_process() -> None:
    nothing = time_cases_in_turn(["nothing"], rounds=2)["nothing"]
    assert len(nothing.timing.seconds) == 2 and nothing.peak_megabytes and nothing.peak_megabytes > 10


def test_A13_a_case_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"the case 'no such case' failed: KeyError"):
        time_cases_in_turn(["no such case"])


def test_A13_a_case_without_enough_memory_leaves_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_memory = {"nothing": CaseCall("tests.test_compare:counting_case", {"fails": "memory"})}
    monkeypatch.setattr(bench.cases, "measure_in_turn", lambda calls, rounds: measure_in_turn(out_of_memory, rounds=1))
    with pytest.raises(RuntimeError, match="the case 'nothing' failed: out of memory"):
        time_cases_in_turn(["nothing"])


def test_A13_the_table_gives_machine_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.tables, "RESULTS", tmp_path)
    path = bench.tables.write_table("name", "A title", "python -m bench.peers", ["what", "ms"], [["this", "1.0"]])
    title, _, said, _, columns, _, row = path.read_text(encoding="utf-8").splitlines()
    assert title == "# A title" and "python -m bench.peers" in said and f"torch {torch.__version__}" in said
    assert (columns, row) == ("| what | ms  |", "| this | 1.0 |")


def test_the_peers_are_of_the_same_size_and_learn_from_the_same_batch() -> None:
    ours = bench.cases.ours(SMALL, "manual")
    theirs = bench.cases.transformers_gpt2(SMALL)
    assert ours.parameter_count() == sum(parameter.numel() for parameter in theirs.parameters())
    assert {name for row in bench.peers.ROWS for name in (row.ours, row.peer)} <= CASES.keys()
    tokens = SMALL.tokens()
    with torch.no_grad():
        ours_loss, theirs_loss = ours(tokens[:, :-1], tokens[:, 1:])[1], theirs(tokens, labels=tokens).loss
    assert abs(ours_loss.item() - theirs_loss.item()) < 0.1


def test_the_gpu_check_runs_from_end_to_end_in_miniature(here: Path) -> None:
    config = GPTConfig(block_size=32, vocab_size=50, n_layer=1, n_head=2, n_embd=16, norm_placement="pre")
    check = bench.gpu_check.Check(
        torch.device("cpu"), replace(config, attention_impl="sdpa"), 2, lengths=(16,), new_tokens=40, rounds=2
    )
    rows = [
        *bench.gpu_check.parity(check),
        *bench.gpu_check.attention_paths(check),
        *bench.gpu_check.generation(check),
        *bench.gpu_check.resume(check),
    ]
    said = "\n".join(": ".join(row) for row in rows)
    for words in ("against float64", "T = 16: manual", "16 texts", "the same", "in two parts 0.0e+00"):
        assert words in said, said


def test_what_processes_tell_each_other_by_formula() -> None:
    config = GPTConfig(
        block_size=8, vocab_size=50, n_layer=2, n_head=2, n_embd=16, norm_placement="pre", tied_head=False
    )
    blocks, elsewhere = bench.scaling.parameters_of(config)
    model = GPT(config)
    outside = [model.token_embedding, model.position_embedding, model.head]
    assert elsewhere == sum(p.numel() for module in outside for p in module.parameters())
    assert blocks + elsewhere == model.parameter_count()
    assert bench.scaling.ddp_bytes(1000, 1) == 0 and bench.scaling.ddp_bytes(1000, 4) == 6000
    assert bench.scaling.fsdp_bytes(1000, 500, 2, 3) == 3 / 2 * (4000 + 2000 + 6000)
    assert bench.scaling.fsdp_bytes(1000, 500, 2, 3, gloo=True) == 3 / 2 * (4000 + 2000 + 12000)


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="counted as Linux counts")
def test_what_processes_tell_each_other_is_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("--n_layer=2", "--n_embd=256", "--n_head=4", "--block_size=16", "--batch_size=1")
    monkeypatch.setattr(bench.scaling, "RUN", (*bench.scaling.RUN, *small))
    settings = parse(TrainSettings, list(bench.scaling.RUN))
    place = bench.scaling.Place("", 2)
    told, worked_out = bench.scaling.told_per_update(place), bench.scaling.worked_out(place, settings)
    assert worked_out > 1e7 and told == pytest.approx(worked_out, rel=0.03)


def test_without_a_gpu_the_check_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        bench.gpu_check.main([])
