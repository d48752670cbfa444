"""compare.py: the two attention paths side by side, by numbers, time, memory and learning curves."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import compare
import model
from comparison.agreement import Agreement, Difference, agreements, attention_results
from comparison.processes import Case, CaseCall, Measured, measure_in_turn
from comparison.runs import learning_curves, read_run
from comparison.speed import FORWARD, STEP, Pair, Work, attention_case, conclusions, kernel_of
from comparison.tables import table_lines
from comparison.timing import Timing, time_in_turn
from model import GPTConfig, MultiHeadAttention
from tests.conftest import TEXT, TINY, Outcome, assert_clean_error, call, run_train
from views.plots import comparison_picture, runs_picture

CPU = torch.device("cpu")
PNG = b"\x89PNG\r\n\x1a\n"


def run_compare(*argv: str) -> Outcome:
    return call(compare.main, *argv, "--device=cpu")


def replaced_fused(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Make the fused path wrong."""
    real = model.fused_attention
    monkeypatch.setattr(model, "fused_attention", lambda *arguments: change(real(*arguments)))


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_A07_both_paths_are_the_same_within_rounding_in_every_precision(dtype: str) -> None:
    found = list(agreements([dtype], 64, 4, CPU, seed=1))
    assert [(case.case, case.of) for case in found] == [
        (case, of)
        for case in ("causal mask alone", "cache", "padding", "padding and cache")
        for of in ("output", "gradients")
    ]
    eps = torch.finfo(getattr(torch, dtype)).eps
    for case in found:
        assert case.agrees, case
        assert case.between.relative < 8 * eps and case.manual.relative < 8 * eps
        assert case.between.absolute > 0, "two ways to compute it are never quite the same"


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        ("float64", lambda context: context * (1 + 1e-9)),
        ("float32", lambda context: context * (1 + 1e-4)),
        ("bfloat16", lambda context: context * 1.05),
        ("float16", lambda context: context * 1.01),
        ("float32", lambda context: context * math.nan),
        ("bfloat16", lambda context: context * math.nan),
    ],
)
def test_A07_a_path_that_is_wrong_is_found_out(
    dtype: str, change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced_fused(monkeypatch, change)
    assert not any(case.agrees for case in agreements([dtype], 64, 4, CPU, seed=1))


def test_A07_a_fault_of_the_gradients_alone_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Biased(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 1.001 * gradient

    replaced_fused(monkeypatch, Biased.apply)
    for case in agreements(["float32"], 64, 4, CPU, seed=1):
        assert case.agrees == (case.of == "output"), case


def test_A07_both_paths_being_wrong_alike_is_found_out() -> None:
    """Against the reference, not only against each other."""
    far, near = Difference(1.0, 0.1), Difference(0.0, 0.0)
    assert not Agreement("float32", "", "output", manual=far, sdpa=far, between=near).agrees
    assert not Agreement("float32", "", "output", manual=near, sdpa=near, between=far).agrees
    assert not Agreement("bfloat16", "", "output", manual=near, sdpa=far, between=far).agrees
    assert Agreement(
        "bfloat16", "", "output", manual=Difference(0, 0.004), sdpa=Difference(0, 0.006), between=far
    ).agrees


def test_A07_the_gradients_compared_are_those_of_x_and_of_all_four_projections() -> None:
    attention = MultiHeadAttention(GPTConfig(n_embd=8, n_head=2)).double()
    x, direction = torch.randn(2, 1, 5, 8, dtype=torch.float64)
    results = attention_results(attention, "manual", x, direction, None, cached=2)
    assert results.keys() == {"output", "x", *(f"{name} projection" for name in ("query", "key", "value", "output"))}
    assert results["output"].shape == results["x"].shape == (1, 3, 8) and all(
        value.abs().max() > 0 for value in results.values()
    )


def test_A07_padding_cache_and_direction_take_part_in_what_is_compared() -> None:
    attention = MultiHeadAttention(GPTConfig(n_embd=8, n_head=2)).double()
    x, direction = torch.randn(2, 1, 5, 8, dtype=torch.float64)
    padding = torch.tensor([[True, False, False, False, False]])

    def results(x: Tensor, direction: Tensor, padding: Tensor | None, cached: int) -> dict[str, Tensor]:
        attention.zero_grad()
        return attention_results(attention, "manual", x, direction, padding, cached)

    changed = x.clone()
    changed[0, 0] += 1
    plain, padded = results(x, direction, None, 0), results(x, direction, padding, 0)
    assert torch.equal(padded["output"][:, 1:], results(changed, direction, padding, 0)["output"][:, 1:])
    assert not torch.allclose(plain["output"][:, 1:], results(changed, direction, None, 0)["output"][:, 1:])
    torch.testing.assert_close(results(x, direction, None, 3)["output"], plain["output"][:, 3:])
    assert not torch.allclose(results(changed, direction, None, 3)["output"], plain["output"][:, 3:])
    torch.testing.assert_close(results(x, 2 * direction, None, 0)["x"], 2 * plain["x"])


def test_A12_the_same_five_steps_twice_give_the_same_bits_on_both_paths() -> None:
    """What is promised for a CPU."""
    for path in ("manual", "sdpa"):
        weights = []
        for _ in range(2):
            torch.manual_seed(3)
            attention = MultiHeadAttention(GPTConfig(n_embd=64, n_head=4, attention_impl=path))
            optimizer = torch.optim.AdamW(attention.parameters(), lr=1e-2)
            for _ in range(5):
                attention(torch.randn(4, 100, 64))[0].square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append(torch.cat([parameter.detach().flatten() for parameter in attention.parameters()]))
        assert torch.equal(*weights), path


# --- time and memory ------------------------------------------------------------------------------------------------


def counting_case(fails: str = "") -> Case:
    """A case for the tests: it tells how often it was run, or fails as asked."""
    count = [0]

    def run() -> None:
        count[0] += 1
        if fails == "slow":
            time.sleep(0.3)
        if fails == "memory" or (fails == "later" and count[0] == 6):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        if fails == "killed":
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        if fails == "fault":
            raise ValueError("a fault of the case")

    return Case({"only": run}, facts=lambda: {"count": str(count[0])})


def case_call(fails: str = "") -> CaseCall:
    return CaseCall("tests.test_compare:counting_case", {"fails": fails})


def test_A13_alternatives_are_warmed_up_and_timed_in_turn() -> None:
    order: list[str] = []
    timings = time_in_turn({name: lambda n=name: order.append(n) for name in "ab"}, rounds=5, at_least_seconds=0.0)  # type: ignore[misc]
    assert order == ["a", "a", "b", "b", *"ab" * 5]
    assert [len(timing.seconds) for timing in timings.values()] == [5, 5]
    assert str(Timing((0.003, 0.001, 0.002))) == "2.00 (1.00 to 3.00)", "the median and the spread"


def test_A13_a_case_is_warmed_up_and_repeated_in_a_process_of_its_own() -> None:
    measured = measure_in_turn({"slow": case_call("slow"), "quick": case_call()}, rounds=2)
    assert measured["slow"].facts == {"count": "6"}, "three to warm up, one to see how long it takes, two rounds"
    assert int(measured["quick"].facts["count"]) > 1000, "a short one is repeated"
    assert len(measured["slow"].timing.seconds) == 2 and measured["slow"].timing.median > 0.3
    assert 0 < measured["quick"].timing.median < measured["slow"].timing.median


@pytest.mark.parametrize("fails", ["memory", "killed", "later"])
def test_A13_running_out_of_memory_is_a_result_and_the_other_path_is_measured(fails: str) -> None:
    """Said by the allocator, or by the system, which kills the process."""
    measured = measure_in_turn({"fails": case_call(fails), "works": case_call()}, rounds=3)
    assert measured["fails"].failed == "out of memory" and not measured["fails"].timings
    assert not measured["works"].failed and len(measured["works"].timing.seconds) == 3


def test_A13_a_case_that_fails_for_another_reason_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"'x' failed: ValueError: a fault of the case"):
        measure_in_turn({"x": case_call("fault")})


def test_A13_memory_is_that_of_the_runs_without_the_program() -> None:
    """Scores of 2,048 x 2,048 in float32 are 16 MB a head, and a backward pass holds at least three of them."""
    arguments = {"dtype": "float32", "length": 2048, "n_embd": 32, "n_head": 2, "tokens": 2048, "device": "cpu"}
    calls = {
        path: CaseCall("comparison.speed:attention_case", {"path": path, **arguments}) for path in ("manual", "sdpa")
    }
    manual, sdpa = measure_in_turn(calls, rounds=1).values()
    assert manual.own_megabytes and sdpa.own_megabytes and manual.peak_megabytes
    assert 90 < manual.own_megabytes < 400 and sdpa.own_megabytes < 40 < manual.peak_megabytes - manual.own_megabytes
    assert manual.timings.keys() == {FORWARD, STEP}
    assert manual.facts == {"kernel": ""} and sdpa.facts == {"kernel": "flash attention for cpu"}


def test_A13_the_kernel_named_is_the_one_that_ran() -> None:
    q = torch.randn(1, 1, 4, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert kernel_of(lambda: attend(q, q, q)) == "flash attention for cpu"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert kernel_of(lambda: attend(q, q, q)) == "attention math"


def measured(*milliseconds: float, megabytes: float = 10.0) -> Measured:
    timing = Timing(tuple(value / 1000 for value in milliseconds))
    return Measured({FORWARD: timing, STEP: timing}, 100.0, megabytes)


OUT_OF_MEMORY = Measured({}, failed="out of memory")


def test_A13_quicker_is_said_only_where_the_spreads_do_not_overlap() -> None:
    assert Pair("float32", 64, measured(1, 2, 3), measured(4, 5, 6)).quicker == "manual"
    assert Pair("float32", 64, measured(4, 5, 6), measured(1, 2, 3)).quicker == "SDPA"
    assert Pair("float32", 64, measured(1, 2, 4), measured(3, 5, 6)).quicker == ""
    assert Pair("float32", 64, OUT_OF_MEMORY, measured(1, 2, 3)).quicker == ""


def test_A13_the_conclusion_states_what_was_measured_and_nothing_else() -> None:
    pairs = [
        Pair("bfloat16", 64, measured(1, 1), measured(2, 2)),
        Pair("bfloat16", 128, measured(1, 1), measured(2, 2)),
        Pair("bfloat16", 256, measured(1, 3), measured(2, 2)),
        Pair("bfloat16", 1024, measured(3, 3, megabytes=400), measured(2, 2)),
        Pair("bfloat16", 4096, OUT_OF_MEMORY, measured(2, 2)),
        Pair("float32", 64, measured(1, 1), measured(2, 2)),
    ]
    assert conclusions(pairs) == [
        "in bfloat16, forward and backward: manual is quicker at T = 64 to 128; neither is clearly quicker at T = 256; "
        "SDPA is quicker at T = 1,024; no manual for lack of memory at T = 4,096; "
        "at T = 1,024 manual takes 400 MB and SDPA 10 MB",
        "in float32, forward and backward: manual is quicker at T = 64; at T = 64 manual takes 10 MB and SDPA 10 MB",
    ]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_A13_what_is_timed_is_in_the_precision_that_the_row_says(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(queries: Tensor, *arguments: Any, **options: Any) -> Tensor:
        seen.add(queries.dtype)
        return real(queries, *arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    case = attention_case("sdpa", dtype, length=8, n_embd=16, n_head=2, tokens=16, device="cpu")
    for run in case.runs.values():
        run()
    assert seen == {getattr(torch, dtype)}


def test_A13_a_picture_is_drawn_where_memory_is_not_told_and_where_nothing_fits() -> None:
    untold = Measured({FORWARD: Timing((1.0,)), STEP: Timing((1.0,))})
    for pairs in ([Pair("float32", 64, untold, untold)], [Pair("float32", 64, OUT_OF_MEMORY, OUT_OF_MEMORY)]):
        assert comparison_picture({"speed": [pair.as_plain() for pair in pairs]}).startswith(PNG)
        assert conclusions(pairs)


def test_tables_are_aligned_and_read_as_markdown() -> None:
    assert table_lines(["a", "bcde"], [["fgh", "i"]]) == ["| a   | bcde |", "| --- | ---- |", "| fgh | i    |"]


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of a table, as measuring takes seconds; manual runs out of memory at 128."""

    def pretended(lengths: list[int], dtypes: list[str], work: Work, rounds: int) -> list[Pair]:
        assert work == Work(16, 2, 64, "cpu") and rounds == 3
        fused = replace(measured(2, 2, 2), facts={"kernel": "flash attention for cpu"})
        return [
            Pair(dtype, length, OUT_OF_MEMORY if length == 128 else measured(1, 1, 1), fused)
            for dtype in dtypes
            for length in lengths
        ]

    monkeypatch.setattr(compare, "measure", pretended)


SMALL = ("--n_embd=16", "--n_head=2", "--tokens=64", "--rounds=3")


def test_A13_the_command_writes_a_table_json_picture_and_a_conclusion(here: Path, quick_speed: None) -> None:
    outcome = run_compare("--lengths", "64", "128", "--dtypes", "float32", "bfloat16", *SMALL)
    assert outcome.status == 0, outcome.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in outcome.stdout.splitlines()]
    assert ["float32", "128", "manual", "out of memory", "", "", "", ""] in rows
    assert [
        "float32",
        "64",
        "SDPA",
        "2.00 (2.00 to 2.00)",
        "2.00 (2.00 to 2.00)",
        "10",
        "0.50",
        "flash attention for cpu",
    ] in rows
    assert outcome.stdout.count("| yes ") == 4 * 4 * 2, "every precision, with and without padding and cache"
    last = outcome.stdout.splitlines()[-1]
    assert last.startswith("On this machine (") and f"torch {torch.__version__}" in last
    assert "manual and SDPA are the same within rounding" in last and "manual is quicker at T = 64;" in last
    written = json.loads((here / "runs/compare/compare.json").read_text(encoding="utf-8"))
    assert len(written["agreement"]) == 32 and all(case["agrees"] for case in written["agreement"])
    assert written["speed"][1]["manual"]["failed"] == "out of memory" and written["speed"][1]["manual"]["step"] is None
    assert written["speed"][0]["sdpa"]["step"] == {"median": 0.002, "min": 0.002, "max": 0.002}
    assert written["settings"]["lengths"] == [64, 128] and written["curves"] is None
    assert (here / "runs/compare/compare.png").read_bytes().startswith(PNG)


def test_A07_the_command_says_no_and_exits_1_when_the_paths_differ(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced_fused(monkeypatch, lambda context: 1.1 * context)
    outcome = run_compare("--rounds=0")
    assert outcome.status == 1 and "| NO " in outcome.stdout and "| yes " not in outcome.stdout
    assert "NOT the same within rounding in bfloat16, cache; " in outcome.stdout.splitlines()[-1]
    assert not (here / "runs/compare/compare.png").exists(), "there is nothing to draw"


def test_real_times_are_measured_by_the_command(here: Path) -> None:
    outcome = run_compare("--lengths", "8", "--dtypes", "float32", *SMALL[:-1], "--rounds=2")
    assert outcome.status == 0, outcome.stderr
    (pair,) = json.loads((here / "runs/compare/compare.json").read_text(encoding="utf-8"))["speed"]
    for path in ("manual", "sdpa"):
        assert pair[path]["forward"]["median"] > 0 and pair[path]["step"]["median"] > 0
    assert pair["sdpa"]["kernel"] == "flash attention for cpu"


def test_A07_twenty_updates_come_from_the_same_seed_and_batches(here: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    preset = "\n".join(option.removeprefix("--").replace("=", " = ", 1) for option in TINY)
    preset = preset.replace("= cpu", '= "cpu"').replace("= float32", '= "float32"')
    (tmp_path / "tiny.toml").write_text(preset + '\ntokenizer = "char"\ndropout = 0.2\n', encoding="utf-8")
    options = ("--text=text.txt", "--preset=tiny.toml", "--max_iters=20", "--rounds=0", "--seed=5")
    outcome = run_compare(*options)
    assert outcome.status == 0, outcome.stderr
    curves = json.loads((here / "runs/compare/compare.json").read_text(encoding="utf-8"))["curves"]
    assert curves["steps"] == list(range(1, 21))
    assert all(abs(difference) < 1e-4 for difference in curves["difference"]), "float32, and no dropout"
    assert curves["manual"][0] > curves["manual"][-1]
    trained = {path: read_run(here / "runs/compare" / path).settings for path in ("manual", "sdpa")}
    assert all(
        settings.attention_impl == path and (settings.dropout, settings.seed) == (0, 5)
        for path, settings in trained.items()
    )
    assert "after 20 updates the training losses are" in outcome.stdout.splitlines()[-1]
    assert (here / "runs/compare/compare.png").read_bytes().startswith(PNG)
    assert_clean_error(
        run_compare(*options),
        "runs/compare/manual",
        "already holds a run",
        "--runs runs/compare/manual runs/compare/sdpa",
    )


def test_curves_are_compared_where_both_have_a_loss(tmp_path: Path) -> None:
    for name, losses in (("a", {1: 2.0, 2: 1.5, 3: None}), ("b", {1: 2.25, 2: 1.0, 3: 1.0, 4: 1.0})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings.toml").write_text("", encoding="utf-8")
        lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    curves = learning_curves(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    assert curves == {"steps": [1, 2], "manual": [2.0, 1.5], "sdpa": [2.25, 1.0], "difference": [0.25, -0.5]}


def test_runs_are_compared_by_their_settings_and_results(here: Path, char_data: Path) -> None:
    for name, rate in (("one", "1e-3"), ("둘", "1e-2")):
        options = (f"--learning_rate={rate}", "--max_iters=6", "--eval_interval=3", "--log_interval=1", *TINY)
        assert run_train(f"--data_dir={char_data}", f"--out_dir=runs/{name}", *options).status == 0
    outcome = run_compare("--runs", "runs/one", "runs/둘")
    assert outcome.status == 0, outcome.stderr
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in outcome.stdout.splitlines() if "|" in line
    ]
    assert rows[0] == ["setting", "runs/one", "runs/둘"] and rows[2] == ["learning_rate", "0.001", "0.01"]
    assert rows[3][0] == "result", "no other setting differs"
    results = {row[0]: row[1:] for row in rows[5:]}
    losses = [read_run(here / "runs" / name).values("val_loss") for name in ("one", "둘")]
    assert results["updates"] == ["6", "6"] and losses[0] != losses[1] and len(set(losses[0])) == 2
    assert results["best validation loss"] == [f"{min(found):.4f}" for found in losses]
    assert results["last validation loss"] == [f"{found[-1]:.4f}" for found in losses]
    assert (here / "runs/compare/compare.png").read_bytes().startswith(PNG)
    assert json.loads((here / "runs/compare/compare.json").read_text(encoding="utf-8"))["runs"] == [
        "runs/one",
        "runs/둘",
    ]


def test_runs_that_began_with_another_are_compared_by_the_architecture_that_they_have(
    here: Path, char_run: Path
) -> None:
    options = ("--max_iters=1", "--device=cpu", "--report=false", "--sample_tokens=0")
    (here / "text.txt").write_text(TEXT, encoding="utf-8")
    trained = run_train(f"--init_from={char_run}", "--text=text.txt", "--out_dir=tuned", *options)
    assert trained.status == 0, trained.stderr
    outcome = run_compare("--runs", "tuned", str(char_run))
    assert outcome.status == 0, outcome.stderr
    rows = outcome.stdout
    assert "init_from" in rows and "n_layer" not in rows and "tokenizer" not in rows
    again = read_run(here / "tuned").settings
    assert (again.n_layer, again.n_embd, again.block_size, again.tokenizer) == (1, 16, 32, "char")
    (here / "mine.toml").write_text((here / "tuned/settings.toml").read_text().replace('text = "text.txt"', ""))
    curves = run_compare("--text=text.txt", "--preset=mine.toml", "--max_iters=2", "--rounds=0", "--out_dir=curves")
    assert curves.status == 0, curves.stderr


@pytest.mark.parametrize("name", ["cost_$\\x$ of $ 5", "_hidden", "한글 & <b>"])
def test_any_name_of_a_run_can_be_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]
    assert runs_picture({name: lines, "other": lines}).startswith(PNG)
    figures: list[Any] = []
    monkeypatch.setattr("views.plots._png", lambda figure: figures.append(figure) or b"")
    runs_picture({name: lines, "other": lines})
    assert len(figures[0].axes[0].get_legend().get_texts()) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--runs", "nowhere"], "nowhere: has no settings.toml; expected a run directory"),
        (["--runs", "a", "--text=b"], "runs and text are both given"),
        (["--lengths", "64", "many"], "lengths = 'many': expected one or more, each a whole number, 1 or more"),
        (["--lengths", "0"], "lengths = '0': expected one or more, each a whole number"),
        (["--dtypes", "int8"], "dtypes = 'int8': expected one or more, each float64 or float32 or bfloat16 or float16"),
        (["--n_embd=20", "--n_head=3"], "n_embd = 20 is not divisible by n_head = 3"),
        (["--n_embd=8"], "n_embd = 8: expected a whole number, 16 or more"),
        (["--text=missing.txt", "--rounds=0"], "missing.txt"),
        (["--preset=missing", "--text=missing.txt", "--rounds=0"], "preset missing: no such file"),
    ],
)
def test_what_cannot_be_compared_is_a_clean_error(arguments: list[str], words: str, here: Path) -> None:
    outcome = run_compare(*arguments)
    assert_clean_error(outcome, words)
    assert outcome.stdout == "" and not (here / "runs").exists(), "refused before anything is done"
