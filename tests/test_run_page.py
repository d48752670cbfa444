"""What a run leaves to look at: loss.png, report.html, samples.jsonl, and wandb."""

import html
import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import views.plots
from config.command_line import parse
from config.schema import TrainSettings
from engine.checkpoint import load_checkpoint
from engine.step_log import read_step_log
from tests.conftest import REPOSITORY, TINY, Outcome, run_sample, run_train
from views.plots import column, run_picture
from views.run_page import key_figures, write_run_page

PNG = b"\x89PNG\r\n\x1a\n"


def train_on(data: Path, *argv: str) -> Outcome:
    outcome = run_train(f"--data_dir={data}", "--out_dir=run", "--log_interval=1", *TINY, *argv)
    assert outcome.status == 0, outcome.stderr
    return outcome


def test_a_run_leaves_a_picture_and_a_page_that_need_nothing_else(here: Path, char_data: Path) -> None:
    train_on(char_data, "--max_iters=6", "--eval_interval=3", "--report", "--n_head=4")
    assert (here / "run/loss.png").read_bytes().startswith(PNG)
    page = (here / "run/report.html").read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!data:)", page) and "@import" not in page and "url(" not in page
    text = html.unescape(re.sub(r"<[^>]*>", " ", page))
    evaluations = [line for line in read_step_log(here / "run/metrics.jsonl") if "val_loss" in line]
    for words in (
        "6 of 6 updates", f"{min(line['val_loss'] for line in evaluations):.4f}", "best validation loss",
        "tokens a second", "cpu (2 threads), float32", f"torch {torch.__version__}", "char vocabulary",
        "python train.py --out_dir=run --resume", "python sample.py --out_dir=run", "after 3 updates",
        "after 6 updates",
    ):  # fmt: skip
        assert words in text, words
    for name in TrainSettings.model_fields:
        assert name in text, name
    assert re.search(r'class="changed"><span>n_head</span><span>4</span>', page)
    assert re.search(r'<div title="[^"]*"><span>dropout</span><span>0.0</span>', page), "not changed"


def test_the_page_is_made_anew_at_each_validation_and_when_the_run_goes_on(here: Path, char_data: Path) -> None:
    train_on(char_data, "--max_iters=4", "--eval_interval=2", "--report")
    shutil.copytree("run", "whole")
    train_on(char_data, "--resume", "--max_iters=8", "--eval_interval=2", "--report")
    assert [line["step"] for line in read_step_log(here / "run/samples.jsonl")] == [2, 4, 6, 8]
    page = (here / "run/report.html").read_text(encoding="utf-8")
    assert "8 of 8 updates" in page and "after 2 updates" in page
    assert (here / "run/loss.png").read_bytes() != (here / "whole/loss.png").read_bytes()


def test_samples_are_what_sample_py_would_write_with_the_same_seed(here: Path, char_data: Path) -> None:
    train_on(char_data, "--max_iters=40", "--eval_interval=40", "--learning_rate=0.01", "--sample_tokens=30")
    (line,) = read_step_log(here / "run/samples.jsonl")
    said = run_sample("--out_dir=run", "--max_new_tokens=30").stdout
    assert line == {"step": 40, "text": said[:-1]} and len(line["text"]) >= 10


def test_neither_samples_nor_pages_change_what_is_learned(here: Path, char_data: Path) -> None:
    weights = []
    for options in (["--sample_tokens=20", "--report"], ["--sample_tokens=0", "--report=false"]):
        train_on(char_data, "--max_iters=6", "--eval_interval=2", "--dropout=0.2", *options)
        weights.append(load_checkpoint(here / "run/last.pt", lazily=False)["model"])
        pages = [name for name in ("loss.png", "report.html") if (here / "run" / name).exists()]
        assert bool(pages) == ("--report" in options)
        assert bool(read_step_log(here / "run/samples.jsonl")) == ("--sample_tokens=20" in options)
        shutil.rmtree("run")
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_samples_of_steps_that_are_done_again_are_dropped(here: Path, char_data: Path) -> None:
    train_on(char_data, "--max_iters=4", "--eval_interval=2", "--sample_tokens=5")
    samples = read_step_log(here / "run/samples.jsonl")
    with (here / "run/samples.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 6, "text": "from a run that was killed"}) + "\n")
    train_on(char_data, "--resume", "--max_iters=8", "--eval_interval=2", "--sample_tokens=5")
    after = read_step_log(here / "run/samples.jsonl")
    assert after[:2] == samples and [line["step"] for line in after] == [2, 4, 6, 8]
    assert "killed" not in after[2]["text"]


def test_text_in_the_page_stays_text(tmp_path: Path) -> None:
    markup = "<script>alert(1)</script> & </pre> \ud800 <b>"
    name = "a <b> run"
    (tmp_path / name).mkdir()
    (tmp_path / name / "samples.jsonl").write_text(json.dumps({"step": 1, "text": markup}) + "\n", encoding="utf-8")
    write_run_page(tmp_path / name, parse(TrainSettings, ["--text=<i>"]), {"data": "<u>"})
    page = (tmp_path / name / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"<(script|b|i|u)>", page)
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &lt;/pre&gt;" in page


def test_a_picture_that_cannot_be_drawn_does_not_stop_the_run(
    here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr("train.write_run_page", fails)
    outcome = train_on(char_data, "--max_iters=6", "--eval_interval=2", "--report")
    assert outcome.stdout.count("loss.png and report.html: failed and is left out") == 1
    assert "No module named 'matplotlib'" in outcome.stdout
    assert load_checkpoint(here / "run/last.pt")["step"] == 6


def test_a_picture_that_cannot_be_drawn_does_not_switch_wandb_off(
    here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise OSError("no picture")

    told: list[int] = []
    stand_in = SimpleNamespace(id="x", log=lambda values, step: told.append(step), finish=lambda: None)
    monkeypatch.setattr("engine.tracking._start_wandb", lambda *arguments: stand_in)
    monkeypatch.setattr("train.write_run_page", fails)
    outcome = train_on(
        char_data, "--max_iters=4", "--eval_interval=2", "--report", "--wandb=offline", "--sample_tokens=0"
    )
    assert "wandb: failed" not in outcome.stdout and set(told) == {1, 2, 3, 4}


def test_matplotlib_is_imported_only_when_a_picture_is_drawn(char_data: Path, tmp_path: Path) -> None:
    for report in (False, True):
        program = (
            f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import train, sample, compare\n"
            f"train.main(['--data_dir={char_data}', '--out_dir={report}', '--max_iters=1', *{TINY!r},"
            f" '--report={report}'])\n"
            "print('matplotlib' in sys.modules)"
        )
        result = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert result.stdout.splitlines()[-1] == str(report), result.stderr


def test_the_curves_are_the_numbers_that_were_written_down() -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "loss": 3.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 2.0, "val_loss": 2.5},
    ]  # fmt: skip
    assert column(lines, "loss") == ([1, 3], [3.0, 2.0]) and column(lines, "val_loss") == ([3], [2.5])
    assert column(lines, "gradient_norm") == ([], [])


def test_the_picture_has_training_and_validation_loss_learning_rate_and_gradient_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = []
    monkeypatch.setattr(views.plots, "_png", lambda figure: figures.append(figure) or b"")
    numbers = {"loss": 3.0, "val_loss": 2.5, "learning_rate": 0.1, "gradient_norm": 0.7}
    run_picture([{"step": 1, **numbers}, {"step": 2, **{name: value / 2 for name, value in numbers.items()}}], "x")
    (figure,) = figures
    drawn = [
        (axes.get_ylabel(), line.get_label(), list(line.get_ydata())) for axes in figure.axes for line in axes.lines
    ]
    assert [(label, values) for label, _, values in drawn] == [
        ("loss, nats per token", [3.0, 1.5]), ("loss, nats per token", [2.5, 1.25]),
        ("learning rate", [0.1, 0.05]), ("gradient norm", [0.7, 0.35]),
    ]  # fmt: skip
    assert [name for _, name, _ in drawn[:2]] == ["training", "validation"]


@pytest.mark.parametrize(
    "lines", [[], [{"step": 1, "loss": 1.0}], [{"step": 5, "val_loss": 1.0, "val_bits_per_byte": 2.0}]]
)
def test_a_run_with_few_numbers_can_be_drawn(lines: list[dict[str, Any]]) -> None:
    assert run_picture(lines, "한글 이름 <b>").startswith(PNG)
    assert len(key_figures(lines)) == {0: 0, 1: 1, 5: 2}[lines[0]["step"] if lines else 0]


# --- wandb ----------------------------------------------------------------------------------------------------------


def wandb_records(folder: Path) -> list[Any]:
    """What offline runs of the real package have written down.

    A seven-byte header, then LevelDB's log format: blocks of 32 KiB, in which each piece of a record has a checksum
    (4 bytes), a length (2) and a kind (1: whole 1, first 2, middle 3, last 4); none begins in a block's last 6 bytes.
    """
    from wandb.proto import wandb_internal_pb2

    records = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, place, pieces = path.read_bytes(), 7, b""
        while place + 7 <= len(content):
            left = 32768 - place % 32768
            if left < 7:
                place += left
                continue
            length, kind = struct.unpack_from("<HB", content, place + 4)
            pieces += content[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):
                records.append(wandb_internal_pb2.Record.FromString(pieces))
                pieces = b""
    return records


def history(records: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in items})
    return rows


def test_L02_L03_wandb_gets_name_settings_metrics_by_step_samples_and_the_loss_curve(
    here: Path, char_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real package, offline, without an account; a resumed run goes on under its id and never backwards."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    train_on(char_data, "--max_iters=4", "--eval_interval=2", "--wandb=offline", "--report", "--sample_tokens=8")
    first = wandb_records(here / "run")
    (begun,) = [record.run for record in first if record.WhichOneof("record_type") == "run"][:1]
    assert begun.display_name == "run" and begun.project == "glassgpt"
    settings = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert settings["n_embd"] == 16 and settings["max_iters"] == 4
    rows = history(first)
    losses = {row["_step"]: row["loss"] for row in rows if "loss" in row}
    expected = {line["step"]: line["loss"] for line in read_step_log(here / "run/metrics.jsonl") if "loss" in line}
    assert losses == expected and losses.keys() == {1, 2, 3, 4}
    assert {row["_step"] for row in rows if "val_loss" in row} == {2, 4}
    tables = [json.loads((path).read_text()) for path in sorted((here / "run").glob("wandb/**/samples*.table.json"))]
    assert max(len(table["data"]) for table in tables) == 2 and tables[0]["columns"] == ["step", "text"]
    samples = [[line["step"], line["text"]] for line in read_step_log(here / "run/samples.jsonl")]
    assert samples in [table["data"] for table in tables]
    assert {row["_step"] for row in rows if row.get("loss curve._type") == "image-file"} == {2, 4}
    train_on(char_data, "--resume", "--max_iters=6", "--eval_interval=2", "--wandb=offline", "--report")
    resumed = wandb_records(here / "run")[len(first) :]
    (again,) = [record.run for record in resumed if record.WhichOneof("record_type") == "run"][:1]
    assert again.run_id == begun.run_id
    assert min(row["_step"] for row in history(resumed)) == 5, "no step is given twice"
