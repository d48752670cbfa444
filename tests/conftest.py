"""What the tests share: tiny texts, prepared data and runs, and ways to run the scripts."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import prepare
import sample
import train
from config.errors import guarded

REPOSITORY = Path(__file__).parent.parent
TINY = (
    "--n_layer=1",
    "--n_head=2",
    "--n_embd=16",
    "--block_size=32",
    "--batch_size=4",
    "--warmup_iters=2",
    "--device=cpu",
    "--dtype=float32",
    "--report=false",  # a picture takes longer than such a run
)
TEXT = "".join(f"Line {i}: the quick brown fox jumps over {i * 7 % 13} lazy dogs.\n" for i in range(80))

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@dataclass
class Outcome:
    """How a script ended."""

    status: int
    stdout: str
    stderr: str


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with preparations kept in it too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data.preparation.PREPARED", tmp_path / "prepared")
    for module in ("data.preparation", "prepare"):
        monkeypatch.setattr(f"{module}.DOWNLOADS", tmp_path / "downloads")
    return tmp_path


def call(main: Callable[[list[str]], None], *argv: str) -> Outcome:
    """Run a script's main in this process, guarded as `run_command` guards it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = guarded(main, list(argv))
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 0
    return Outcome(status, out.getvalue(), err.getvalue())


def run_prepare(*argv: str) -> Outcome:
    return call(prepare.main, *argv)


def run_train(*argv: str) -> Outcome:
    return call(train.main, *argv)


def run_sample(*argv: str) -> Outcome:
    return call(sample.main, *argv, "--device=cpu")


def script(name: str, *argv: str, env: dict[str, str] | None = None, cwd: Path, stdin: bytes = b"") -> Outcome:
    """Run a script as a user does, in a process of its own."""
    result = subprocess.run(
        [sys.executable, str(REPOSITORY / name), *argv],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        input=stdin,
        capture_output=True,
        timeout=300,
        check=False,
    )
    return Outcome(result.returncode, result.stdout.decode("utf-8"), result.stderr.decode("utf-8", errors="replace"))


def assert_clean_error(outcome: Outcome, *words: str) -> None:
    """Exit status 2 and one or two lines that contain every word, without a traceback."""
    assert outcome.status == 2, (outcome.status, outcome.stdout, outcome.stderr)
    message = outcome.stderr.strip().split("\r")[-1].strip()
    assert "Traceback" not in outcome.stderr
    assert len([line for line in message.splitlines() if line.strip()]) <= 2, message
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


@pytest.fixture(scope="session")
def char_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TEXT prepared by characters."""
    folder = tmp_path_factory.mktemp("char")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    assert run_prepare(str(folder / "text.txt"), "--tokenizer=char", f"--out_dir={folder / 'data'}").status == 0
    return folder / "data"


@pytest.fixture(scope="session")
def char_run(char_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on it, long enough to know that the text goes on."""
    folder = tmp_path_factory.mktemp("run") / "char"
    outcome = run_train(
        f"--data_dir={char_data}", f"--out_dir={folder}", "--max_iters=150", "--learning_rate=0.01", *TINY
    )
    assert outcome.status == 0, outcome.stderr
    return folder


@pytest.fixture
def gpt2_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A stand-in for tiktoken's gpt2: its pattern and ids, with bytes alone for ranks (nothing is downloaded)."""
    import tiktoken
    import tiktoken_ext.openai_public as public

    ranks = {bytes([value]): value for value in range(256)}
    ranks.update({f"filler {i}".encode(): i for i in range(256, 50256)})
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=public.r50k_pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    yield
