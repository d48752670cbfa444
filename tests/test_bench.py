"""The benchmarks run, in miniature, and say what they measured and no more."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench.attention
import bench.cases
import bench.gpu_check
import bench.peers
import bench.processes
import bench.timing
from bench.cases import CASES, SMALL
from bench.processes import time_cases_in_turn
from bench.timing import Timing, time_in_turn
from model import GPTConfig


def test_A13_alternatives_are_warmed_up_and_timed_in_turn() -> None:
    order: list[str] = []
    timings = time_in_turn({name: lambda n=name: order.append(n) for name in "ab"}, rounds=5, at_least_seconds=0.0)  # type: ignore[misc]
    assert order == ["a", "a", "b", "b", *"ab" * 5]
    assert [len(timing.seconds) for timing in timings.values()] == [5, 5]
    assert str(Timing((0.003, 0.001, 0.002))) == "2.00 (1.00 to 3.00)", "the median and the spread"


def test_A13_a_case_runs_in_its_own_process_and_tells_time_and_peak_memory() -> None:
    measured = time_cases_in_turn(["nothing", "attention manual float32 32"], rounds=2)
    nothing, attention = measured.values()
    assert len(attention.timing.seconds) == 2 and attention.timing.median > nothing.timing.median > 0
    assert attention.peak_megabytes > nothing.peak_megabytes > 10


def test_A13_a_case_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"no such case.*python -m bench.processes"):
        time_cases_in_turn(["no such case"])


def test_A13_the_table_gives_time_memory_spread_machine_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.timing, "RESULTS", tmp_path)
    monkeypatch.setattr(bench.attention, "ATTENTION_DTYPES", ("float32",))
    monkeypatch.setattr(bench.attention, "ATTENTION_LENGTHS", (32,))
    monkeypatch.setattr(
        bench.attention, "time_cases_in_turn", lambda names, rounds: time_cases_in_turn(names, rounds=2)
    )
    bench.attention.main()
    title, _, machine, _, columns, _, row = (tmp_path / "attention.md").read_text(encoding="utf-8").splitlines()
    assert "python -m bench.attention" in machine and f"torch {torch.__version__}" in machine
    assert [cell.strip() for cell in columns.strip("|").split("|")] == [
        "dtype", "T", "manual, ms (min to max)", "sdpa, ms (min to max)", "manual / sdpa", "manual, peak MB",
        "sdpa, peak MB",
    ]  # fmt: skip
    assert row.count(" to ") == 2 and not {"faster", "best", "wins"} & set((title + row).split())


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


def test_without_a_gpu_the_check_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        bench.gpu_check.main([])
