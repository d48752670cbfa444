"""The whole job as a user does it: command lines, from another working directory, with a text of one's own."""

import json
import shutil
from pathlib import Path

from tests.conftest import REPOSITORY, TEXT, TINY, script

SHAPE = [argument for argument in TINY if not argument.startswith("--dtype")]


def test_prepare_train_resume_sample_from_another_directory(tmp_path: Path) -> None:
    (tmp_path / "my text.txt").write_text(TEXT, encoding="utf-8")
    prepared = script(
        "prepare.py", "my text.txt", "--tokenizer=bpe", "--vocab_size=300", "--out_dir=tokens", cwd=tmp_path
    )
    assert prepared.status == 0, prepared.stderr
    assert "300 ids" in prepared.stdout and "characters per token" in prepared.stdout

    arguments = ("--data_dir=tokens", "--out_dir=runs/mine", "--eval_interval=20", *SHAPE)
    trained = script("train.py", *arguments, "--max_iters=40", "--lr_decay=constant", cwd=tmp_path)
    assert trained.status == 0, trained.stderr
    assert "first loss  about ln(300)" in trained.stdout
    assert "step 40: validation loss" in trained.stdout + trained.stderr

    resumed = script("train.py", "--out_dir=runs/mine", "--resume", "--max_iters=60", cwd=tmp_path)
    assert resumed.status == 0, resumed.stderr
    assert "60 updates" in resumed.stdout and "40 of them done" in resumed.stdout
    lines = [json.loads(line) for line in (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()]
    validation = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    assert list(validation) == [20, 40, 60] and validation[60] < validation[20]

    # Everything that sampling needs is in the checkpoint: the data may be gone, the folder moved.
    for path in (tmp_path / "tokens").iterdir():
        path.unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs/mine/best.pt").rename(tmp_path / "elsewhere/model.pt")
    sampled = script("sample.py", "--checkpoint=model.pt", "--prompt=Line 7", "--max_new_tokens=40", "--num_samples=2",
                     cwd=tmp_path / "elsewhere")  # fmt: skip
    assert sampled.status == 0, sampled.stderr
    assert sampled.stdout.count("Line 7") >= 2 and "sample 2 of 2" in sampled.stdout
    again = script("sample.py", "--checkpoint=model.pt", "--prompt=Line 7", "--max_new_tokens=40", "--num_samples=2",
                   cwd=tmp_path / "elsewhere")  # fmt: skip
    assert again.stdout == sampled.stdout


def test_one_command_trains_on_a_text_of_ones_own(tmp_path: Path) -> None:
    before = set((REPOSITORY / "data/prepared").glob("poems-*"))
    try:
        train_and_sample(tmp_path)
    finally:
        for folder in set((REPOSITORY / "data/prepared").glob("poems-*")) - before:
            shutil.rmtree(folder)


def train_and_sample(tmp_path: Path) -> None:
    (tmp_path / "poems").mkdir()
    for i in range(5):
        (tmp_path / "poems" / f"{i}.txt").write_text(TEXT, encoding="utf-8")
    arguments = ("quick", "--text=poems", "--tokenizer=char", "--max_iters=60", "--learning_rate=0.01", *SHAPE)
    outcome = script("train.py", *arguments, cwd=tmp_path)
    assert outcome.status == 0, outcome.stderr
    assert (tmp_path / "runs/poems/last.pt").exists() and (tmp_path / "runs/poems/settings.toml").exists()
    sampled = script("sample.py", "--prompt=Line", "--max_new_tokens=20", cwd=tmp_path)
    assert sampled.status == 0 and len(sampled.stdout) > 10, sampled.stderr


def test_bad_input_ends_every_script_with_status_2_and_no_traceback(tmp_path: Path) -> None:
    for name, argument in (
        ("prepare.py", "missing.txt"),
        ("train.py", "--text=missing.txt"),
        ("sample.py", "--out_dir=missing"),
    ):
        outcome = script(name, argument, cwd=tmp_path)
        assert outcome.status == 2 and outcome.stdout == "", outcome.stderr
        assert outcome.stderr.startswith(f"{name}: missing") and outcome.stderr.count("\n") == 1, outcome.stderr
    assert list(tmp_path.iterdir()) == []
