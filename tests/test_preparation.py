"""Preparing text: sources, encodings, documents, splits, and that nothing half-made is left behind."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data.preparation
import data.sources
from config.errors import UserError
from data.dataset import Metadata, PreparedData, TokenFile, read_metadata, to_stored, token_dtype
from data.download import download
from data.preparation import _spread
from data.sources import Document, open_source, read_documents
from tests.conftest import REPOSITORY, TINY, assert_clean_error, run_prepare, run_train, script

NOTHING = (*TINY, "--max_iters=0")
ACCENTED = "Où est l'été? Ça va très bien, naïve façade.\n" * 20


def prepared_ids(folder: Path) -> list[int]:
    """All tokens of a prepared folder, training part first."""
    meta = read_metadata(folder)
    return [
        int(i)
        for name in ("train.bin", "val.bin")
        for i in np.fromfile(folder / name, dtype=f"<{meta.dtype[0]}{2 if meta.dtype == 'uint16' else 4}")
    ]


def prepare_file(here: Path, content: bytes, *arguments: str, name: str = "text.txt") -> PreparedData:
    (here / name).write_bytes(content)
    outcome = run_prepare(name, "--out_dir=out", *arguments)
    assert outcome.status == 0, outcome.stderr
    return PreparedData(here / "out")


# --- Encodings and line ends ---------------------------------------------------------------------------------------


def test_D02_files_are_the_same_under_every_locale(here: Path) -> None:
    (here / "text.txt").write_text(ACCENTED, encoding="utf-8")
    ascii_locale = {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "LC_ALL": "C"}
    for name, env in (("ascii", ascii_locale), ("utf8", {"PYTHONUTF8": "1"})):
        outcome = script("prepare.py", "text.txt", "--tokenizer=char", f"--out_dir={name}", cwd=here, env=env)
        assert outcome.status == 0, outcome.stderr
    for name in ("train.bin", "val.bin", "tokenizer.json", "meta.json"):
        assert (here / "ascii" / name).read_bytes() == (here / "utf8" / name).read_bytes(), name


def test_D02_a_file_in_another_encoding_is_read_when_named_and_refused_when_not(here: Path) -> None:
    latin = ACCENTED.encode("latin-1")
    (here / "latin.txt").write_bytes(latin)
    place = latin.index("ù".encode("latin-1"))
    assert_clean_error(run_prepare("latin.txt", "--out_dir=out"), "latin.txt", f"byte {place}", "--encoding=latin-1")
    assert not (here / "out").exists()
    data = prepare_file(here, latin, "--tokenizer=char", "--encoding=latin-1", name="latin.txt")
    assert data.tokenizer.decode(prepared_ids(data.folder)) == ACCENTED
    assert_clean_error(run_prepare("latin.txt", "--encoding=klingon"), "klingon", "utf-8")
    assert_clean_error(run_prepare("latin.txt", "--encoding=base64"), "base64")


def test_D02_the_place_of_a_wrong_byte_is_right_far_into_a_file(here: Path) -> None:
    good = "é".encode() * (data.sources.PIECE_BYTES // 2 + 10)
    (here / "text.txt").write_bytes(b"x" + good + b"\xff")
    assert_clean_error(run_prepare("text.txt"), f"byte {1 + len(good)}:")


@pytest.mark.parametrize("piece", [1, 2, 3, 1 << 20])
def test_D15_a_byte_order_mark_and_crlf_are_no_tokens_wherever_the_reading_is_cut(
    piece: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.sources, "PIECE_BYTES", piece)
    content = "\ufeffone\r\ntwo\rthree\n\r\nfour\r".encode()
    (here / "text.txt").write_bytes(content)
    text = "".join("".join(pieces) for pieces in read_documents(Document("text.txt", here / "text.txt"), "utf-8"))
    assert text == "one\ntwo\rthree\n\nfour\r"


def test_D15_the_vocabulary_has_no_mark(here: Path) -> None:
    tokenizer = prepare_file(here, "\ufefffirst\r\nsecond\r\n".encode() * 5, "--tokenizer=char").tokenizer
    assert b"\r" not in tokenizer.token_bytes
    mark = tokenizer.token_bytes.index("\ufeff".encode())  # four of the five are inside the file and stay
    assert prepared_ids(here / "out").count(mark) == 4
    assert (
        prepare_file(
            here, b"\xef\xbb\xbfplain\r\n" * 1 + b"text", "--tokenizer=char", "--val_fraction=0"
        ).tokenizer.token_bytes.count("\ufeff".encode())
        == 0
    )


def test_D14_korean_is_kept_as_it_is_and_the_counts_are_printed(here: Path) -> None:
    text = "안녕하세요 세계. " * 30 + "\u1112\u1161\u11ab " * 30
    (here / "ko.txt").write_text(text, encoding="utf-8")
    for tokenizer in ("char", "byte", "bpe"):
        outcome = run_prepare("ko.txt", f"--tokenizer={tokenizer}", "--vocab_size=300", f"--out_dir={tokenizer}")
        prepared = PreparedData(here / tokenizer)
        assert prepared.tokenizer.decode(prepared_ids(here / tokenizer)) == text
        count = len(prepared_ids(here / tokenizer))
        for words in (f"{len(text)} characters", f"{count:,}", f"{count / len(text):.2f} tokens per character"):
            assert words in outcome.stdout, outcome.stdout


# --- Sources -------------------------------------------------------------------------------------------------------


def test_D07_documents_of_a_folder_are_sorted_and_each_ends_in_one_separator(here: Path, gpt2_cache: None) -> None:
    for name, text in (("b.txt", "second\n\n\n"), ("a.txt", "first"), ("c/d.txt", "third"), (".hidden", "no")):
        (here / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "docs" / name).write_text(text)
    outcome = run_prepare("docs", "--tokenizer=gpt2", "--out_dir=out", "--val_fraction=0")
    assert outcome.status == 0, outcome.stderr
    ids = prepared_ids(here / "out")
    assert ids.count(50256) == 3 and ids[-1] == 50256
    shown = PreparedData(here / "out").tokenizer.decode(ids, show_special=True)
    assert shown == "first<|endoftext|>second\n\n\n<|endoftext|>third<|endoftext|>"
    assert "3 documents" in outcome.stdout


def test_D07_no_separator_is_invented_inside_a_file_however_it_is_cut(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.sources, "PIECE_BYTES", 7)
    monkeypatch.setattr(data.preparation, "PIECES_AT_ONCE", 2)
    prepared = prepare_file(here, ACCENTED.encode(), "--vocab_size=300", "--val_fraction=0.2")
    ids = prepared_ids(prepared.folder)
    assert ids.count(prepared.tokenizer.end_of_text) == 1 and ids[-1] == prepared.tokenizer.end_of_text
    assert prepared.tokenizer.decode(ids) == ACCENTED


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_D09_the_pieces_in_which_a_text_is_read_change_nothing(
    tokenizer: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "text.txt").write_text(
        "\n".join(f"def f{i}(x):\n    return  x * {i}  # é한" for i in range(200)), encoding="utf-8"
    )
    results = []
    for size in (11, 97, 1 << 20):
        monkeypatch.setattr(data.sources, "PIECE_BYTES", size)
        assert run_prepare("text.txt", f"--tokenizer={tokenizer}", "--vocab_size=400", "--out_dir=out").status == 0
        results.append([(here / "out" / name).read_bytes() for name in ("train.bin", "val.bin", "tokenizer.json")])
    assert results[0] == results[1] == results[2]


def test_D10_a_text_without_any_place_to_cut_is_refused_before_memory_runs_out(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.preparation, "PIECE_LIMIT", 1000)
    monkeypatch.setattr(data.sources, "PIECE_BYTES", 100)
    (here / "text.txt").write_text("x" * 5000)
    assert_clean_error(run_prepare("text.txt", "--out_dir=out"), "text.txt", "1,000 characters", "--tokenizer=char")
    assert sorted(path.name for path in here.iterdir()) == ["text.txt"]
    assert run_prepare("text.txt", "--out_dir=out", "--tokenizer=char").status == 0


def test_D17_a_folder_of_500_one_line_files_works(here: Path) -> None:
    (here / "many").mkdir()
    for i in range(500):
        (here / "many" / f"{i:03}.txt").write_text(f"line {i}\n")
    outcome = run_prepare("many", "--tokenizer=char", "--out_dir=out")
    assert outcome.status == 0 and "500 documents" in outcome.stdout
    prepared = PreparedData(here / "out")
    assert prepared_ids(here / "out").count(prepared.tokenizer.end_of_text) == 500


@pytest.mark.parametrize(
    "what", ["missing.txt", "empty folder", "empty.txt", "folder of empty files", "no*match", "folder/**/*.md"]
)
def test_D17_nothing_to_read_is_a_clean_error(what: str, here: Path) -> None:
    (here / "empty folder").mkdir()
    (here / "empty.txt").touch()
    (here / "folder of empty files").mkdir()
    (here / "folder of empty files" / "a.txt").touch()
    before = sorted(here.rglob("*"))
    assert_clean_error(run_prepare(what, "--out_dir=out"), what, "expected")
    assert sorted(here.rglob("*")) == before


def test_D17_a_glob_takes_the_files_that_match(here: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (here / name).write_text(name)
    for pattern in ("*.txt", f"{here}/*.txt"):
        with open_source(pattern, here) as source:
            assert [document.path.name for document in source.documents] == ["a.txt", "b.txt"]


def test_D17_standard_input_is_a_source(here: Path) -> None:
    outcome = script("prepare.py", "-", "--tokenizer=char", "--out_dir=out", cwd=here, stdin=ACCENTED.encode())
    assert outcome.status == 0, outcome.stderr
    prepared = PreparedData(here / "out")
    assert prepared.tokenizer.decode(prepared_ids(here / "out")) == ACCENTED
    assert sorted(path.name for path in (here / "out").iterdir()) == [
        "meta.json",
        "tokenizer.json",
        "train.bin",
        "val.bin",
    ]
    assert_clean_error(script("prepare.py", "-", "--out_dir=out2", cwd=here, stdin=b""), "standard input", "empty")


def test_D17_a_file_that_is_no_text_is_named(here: Path) -> None:
    (here / "mixed").mkdir()
    (here / "mixed" / "a.txt").write_text("text")
    (here / "mixed" / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff")
    assert_clean_error(run_prepare("mixed", "--out_dir=out"), "b.png", "leave the file out")
    assert not (here / "out").exists()


def test_the_standard_library_is_a_source_without_network(here: Path) -> None:
    with open_source("stdlib", here) as source:
        names = [document.name for document in source.documents]
        assert names == sorted(names) and "argparse.py" in names and source.size() > 5_000_000
    assert not any(part in name.split("/") for name in names for part in ("test", "tests", "idlelib", "site-packages"))
    assert "Python 3." in source.description


def test_a_python_without_its_sources_gets_a_clean_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.sources.sysconfig, "get_path", lambda name: str(here / "nowhere"))
    assert_clean_error(run_prepare("stdlib", "--out_dir=out"), "stdlib", "a text of your own")


class FailingServer(http.server.BaseHTTPRequestHandler):
    """Answers by the path: a 503 page, or some bytes."""

    def do_GET(self) -> None:
        self.send_response(503 if self.path == "/busy" else 200)
        self.end_headers()
        self.wfile.write(
            {"/busy": b"<html>busy</html>", "/good": b"hello", "/long": b"hello" * 100}.get(self.path, b"hullo")
        )

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FailingServer) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


@pytest.mark.parametrize(("page", "words"), [("/busy", "503"), ("/wrong", "5 bytes"), ("/long", "5 bytes")])
def test_D16_a_download_that_is_not_the_expected_file_leaves_nothing(
    page: str, words: str, server: str, here: Path
) -> None:
    with pytest.raises(UserError, match=words):
        download(server + page, here / "sub" / "file.txt", sha256=HELLO, size=5)
    assert not list(here.rglob("file*"))
    download(server + "/good", here / "sub" / "file.txt", sha256=HELLO, size=5)
    assert (here / "sub" / "file.txt").read_bytes() == b"hello"


def test_D16_without_network_shakespeare_says_how_to_go_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.sources, "SHAKESPEARE_URL", "http://127.0.0.1:9/input.txt")
    assert_clean_error(run_prepare("shakespeare", "--out_dir=out"), "127.0.0.1:9", "name its path")
    assert not (here / "out").exists() and not (here / "downloads").exists()


# --- Splits and token files ----------------------------------------------------------------------------------------


def test_D05_an_empty_validation_part_is_reported_when_preparing(here: Path) -> None:
    (here / "tiny.txt").write_text("abcdefghijklmnopqrstuvwxyz0123")
    outcome = run_prepare("tiny.txt", "--tokenizer=char", "--val_fraction=0.01", "--out_dir=out")
    assert_clean_error(outcome, "val_fraction = 0.01", "31 tokens", "or 0")
    assert sorted(path.name for path in here.iterdir()) == ["tiny.txt"]


def test_D05_without_validation_training_says_so_and_never_shows_nan(here: Path) -> None:
    (here / "tiny.txt").write_text("abcdefghijklmnopqrstuvwxyz0123")
    outcome = run_train("--text=tiny.txt", "--tokenizer=char", "--val_fraction=0", "--n_layer=1",
                        "--n_head=1", "--n_embd=8", "--block_size=8", "--max_iters=3", "--eval_interval=1",
                        "--out_dir=run")  # fmt: skip
    assert outcome.status == 0 and "evaluation is off" in outcome.stdout
    lines = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines and not any("val_loss" in line for line in lines)
    assert (here / "run" / "last.pt").exists() and not (here / "run" / "best.pt").exists()


@pytest.mark.parametrize(("fraction", "validation"), [(0.1, 2), (0.5, 10), (0.0, 0)])
def test_D05_the_split_is_at_the_end_and_of_the_size_asked_for(fraction: float, validation: int, here: Path) -> None:
    prepared = prepare_file(here, b"abcdefghijklmnopqrs", "--tokenizer=char", f"--val_fraction={fraction}")
    assert (prepared.metadata.train_tokens, prepared.metadata.val_tokens) == (20 - validation, validation)
    assert prepared_ids(prepared.folder) == list(range(20))


def test_D05_a_text_shorter_than_the_context_is_refused_before_training(here: Path) -> None:
    (here / "tiny.txt").write_text("abcdefghij" * 4)
    outcome = run_train(
        "--text=tiny.txt", "--tokenizer=char", "--block_size=64", "--n_embd=8", "--n_head=1", "--out_dir=run"
    )
    assert_clean_error(outcome, "block_size = 64", "65", "37 tokens")
    assert not (here / "run").exists()


def test_D12_the_type_of_stored_ids_follows_the_vocabulary() -> None:
    assert [token_dtype(size) for size in (66, 65536, 65537, 200000)] == ["uint16", "uint16", "uint32", "uint32"]
    ids = np.array([0, 70000, 99999], dtype=np.uint32)
    assert to_stored(ids, token_dtype(100000)).tolist() == [0, 70000, 99999]
    with pytest.raises(ValueError, match="99999 does not fit uint16"):
        to_stored(ids, "uint16")


@pytest.mark.parametrize(("dtype", "content"), [("uint16", [1, 65535]), ("uint32", [1, 70000])])
def test_D12_ids_are_read_back_as_they_were_written(dtype: str, content: list[int], tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(to_stored(np.array(content, dtype=np.uint32), dtype).tobytes())
    digest = hashlib.sha256((tmp_path / "x.bin").read_bytes()).hexdigest()
    tokens = TokenFile(tmp_path / "x.bin", dtype, 100000, 2, digest)
    assert tokens.read(0, 2).tolist() == content and len(tokens) == 2
    assert (tmp_path / "x.bin").read_bytes()[:2] == b"\x01\x00", "little-endian"


def test_D12_the_type_is_recorded_and_read_from_the_metadata(char_data: Path) -> None:
    meta = json.loads((char_data / "meta.json").read_text())
    assert meta["dtype"] == "uint16"
    assert PreparedData(char_data).train.dtype == np.dtype("<u2")


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_D13_an_id_beyond_the_vocabulary_is_refused_when_loading(here: Path, char_data: Path) -> None:
    bad = copy_of(char_data, here / "bad")
    size = read_metadata(bad).vocab_size
    with (bad / "train.bin").open("r+b") as file:
        file.seek(200)
        file.write(np.array([size], dtype="<u2").tobytes())
    assert_clean_error(
        run_train("--data_dir=bad", "--out_dir=run", *NOTHING), "train.bin", f"id {size}", f"vocab_size is {size}"
    )
    assert not (here / "run").exists()


def test_D13_a_token_file_of_another_length_is_refused(here: Path, char_data: Path) -> None:
    for change in (
        lambda path: os.truncate(path, 100),
        lambda path: os.truncate(path, 101),
        lambda path: path.unlink(),
    ):
        bad = copy_of(char_data, here / f"bad{len(list(here.iterdir()))}")
        change(bad / "val.bin")
        assert_clean_error(
            run_train(f"--data_dir={bad}", "--out_dir=run", *NOTHING), "val.bin", "prepare the data again"
        )


def test_V04_without_metadata_the_vocabulary_is_never_guessed(here: Path, char_data: Path) -> None:
    bad = copy_of(char_data, here / "bad")
    (bad / "meta.json").unlink()
    assert_clean_error(run_train("--data_dir=bad", "--out_dir=run", *NOTHING), "meta.json", "never guessed")
    assert_clean_error(run_train("--data_dir=nowhere", "--out_dir=run", *NOTHING), "nowhere/meta.json")


@pytest.mark.parametrize(
    "change", [{"vocab_size": -1}, {"vocab_size": "66"}, {"dtype": "int8"}, {"extra": 1}, {"format_version": 2}, None]
)
def test_V04_metadata_that_says_something_impossible_is_refused(
    change: dict[str, object] | None, here: Path, char_data: Path
) -> None:
    bad = copy_of(char_data, here / "bad")
    meta = json.loads((bad / "meta.json").read_text())
    (bad / "meta.json").write_text("{" if change is None else json.dumps(meta | change))
    assert_clean_error(run_train("--data_dir=bad", "--out_dir=run", *NOTHING), "meta.json", "prepare the data again")


def test_V04_a_tokenizer_that_the_metadata_does_not_know_is_refused(here: Path, char_data: Path) -> None:
    bad = copy_of(char_data, here / "bad")
    (bad / "tokenizer.json").write_text('{"name": "byte"}')
    assert_clean_error(run_train("--data_dir=bad", "--out_dir=run", *NOTHING), "tokenizer.json", "meta.json")


def test_V04_padding_is_a_setting_of_its_own_and_both_sizes_are_printed(here: Path, char_data: Path) -> None:
    outcome = run_train(f"--data_dir={char_data}", "--vocab_padding_multiple=64", "--n_embd=8", "--n_head=1",
                        "--n_layer=1", "--block_size=8", "--max_iters=0", "--out_dir=run")  # fmt: skip
    size = read_metadata(char_data).vocab_size
    assert f"vocabulary of {size}, padded to 64" in outcome.stdout, outcome.stderr


# --- The prepared folder -------------------------------------------------------------------------------------------


def test_nothing_is_left_when_preparing_is_interrupted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "text.txt").write_text(ACCENTED, encoding="utf-8")

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data.preparation, "_split", interrupted)
    assert run_prepare("text.txt", "--tokenizer=char", "--out_dir=out").status == 130
    assert sorted(path.name for path in here.iterdir()) == ["text.txt"]


def test_a_folder_that_prepare_did_not_write_is_never_replaced(here: Path) -> None:
    (here / "thesis").mkdir()
    (here / "thesis" / "chapter.txt").write_text("precious")
    (here / "text.txt").write_text(ACCENTED, encoding="utf-8")
    assert_clean_error(run_prepare("text.txt", "--out_dir=thesis"), "thesis", "chapter.txt", "not a prepared folder")
    assert (here / "thesis" / "chapter.txt").read_text() == "precious"


def test_preparing_again_replaces_the_folder(here: Path) -> None:
    prepare_file(here, b"first text, first text", "--tokenizer=char", "--val_fraction=0")
    prepared = prepare_file(here, b"second", "--tokenizer=byte", "--val_fraction=0")
    assert prepared.tokenizer.decode(prepared_ids(prepared.folder)) == "second"
    assert sorted(path.name for path in here.iterdir()) == ["out", "text.txt"]


def test_a_folder_of_another_program_that_has_a_meta_json_is_never_replaced(here: Path) -> None:
    (here / "dataset").mkdir()
    for name in ("meta.json", "images.tar"):
        (here / "dataset" / name).write_text("{}")
    (here / "text.txt").write_text(ACCENTED, encoding="utf-8")
    assert_clean_error(run_prepare("text.txt", "--out_dir=dataset"), "dataset", "images.tar")
    assert (here / "dataset" / "images.tar").exists()


def test_the_text_itself_is_never_in_danger(here: Path) -> None:
    prepared = prepare_file(here, b"first text, first text", "--tokenizer=char", "--val_fraction=0")
    (prepared.folder / "input.txt").write_text("second text, second text")
    assert_clean_error(run_prepare("out/input.txt", "--out_dir=out"), "input.txt")
    assert (prepared.folder / "input.txt").read_text() == "second text, second text"


@pytest.mark.parametrize("name", ["train.bin", "meta.json", "tokenizer.json"])
def test_a_text_with_the_name_of_one_of_our_files_is_never_replaced(name: str, here: Path) -> None:
    (here / "d").mkdir()
    (here / "d" / name).write_text("some text " * 9)
    (here / "other.txt").write_text("other text " * 9)
    for source in (f"d/{name}", "d", "other.txt"):
        assert_clean_error(run_prepare(source, "--tokenizer=char", "--out_dir=d"), name)
    assert [path.name for path in (here / "d").iterdir()] == [name]
    assert (here / "d" / name).read_text() == "some text " * 9


def test_a_prepared_folder_inside_the_text_does_not_become_part_of_it(here: Path) -> None:
    (here / "nest").mkdir()
    (here / "nest" / "a.txt").write_text("some text " * 9)
    assert run_prepare("nest", "--tokenizer=char", "--out_dir=nest/out").status == 0
    assert_clean_error(run_prepare("nest", "--tokenizer=char", "--out_dir=nest/out"), "nest/out")


def test_D02_the_end_of_a_text_is_never_dropped(here: Path) -> None:
    data = prepare_file(
        here, b"hello, world. " * 40 + b"tail +AGEAYgBjAGQAZQBm", "--encoding=utf-7", "--tokenizer=char"
    )
    assert data.tokenizer.decode(prepared_ids(data.folder)).endswith("tail abcdef")


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_D17_files_without_any_text_are_a_clean_error(tokenizer: str, here: Path) -> None:
    (here / "marks").mkdir()
    for i in range(5):
        (here / "marks" / f"{i}.txt").write_bytes(b"\xef\xbb\xbf")
    assert_clean_error(run_prepare("marks", f"--tokenizer={tokenizer}", "--out_dir=out"), "marks", "no text")


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe", "one that is there"])
def test_D02_half_a_surrogate_pair_is_a_clean_error(tokenizer: str, here: Path) -> None:
    if tokenizer == "one that is there":
        tokenizer = str(prepare_file(here, b"ok " * 30, "--vocab_size=257").folder / "tokenizer.json")
    (here / "text.txt").write_text("ok " * 30 + "\\ud800")
    outcome = run_prepare("text.txt", f"--tokenizer={tokenizer}", "--encoding=unicode_escape", "--out_dir=new")
    assert_clean_error(outcome, "text.txt", "surrogate")
    assert not (here / "new").exists()


def test_the_working_directory_may_be_the_prepared_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "text.txt").write_text("some text")
    (here / "inside").mkdir()
    monkeypatch.chdir(here / "inside")
    for _ in range(2):
        outcome = run_prepare("../text.txt", "--out_dir=.", "--tokenizer=char", "--val_fraction=0")
        assert outcome.status == 0, outcome.stderr
    assert len(list((here / "inside").iterdir())) == 4


def small_run(*arguments: str, out_dir: str) -> None:
    shape = ("--tokenizer=char", "--n_embd=8", "--n_head=1", "--n_layer=1", "--block_size=8", "--max_iters=0")
    outcome = run_train(*shape, *arguments, f"--out_dir={out_dir}")
    assert outcome.status == 0, outcome.stderr


def test_train_text_prepares_every_text_and_every_way_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = data.preparation.prepare
    monkeypatch.setattr(data.preparation, "prepare", lambda *a: calls.append(a) or real(*a))
    text, other = "some text to train on, again and again. " * 20, "some other text to train on, over and over. " * 20
    (here / "text.txt").write_text(text)
    for out_dir, expected in (("a", 1), ("b", 1)):
        small_run("--text=text.txt", out_dir=out_dir)
        assert len(calls) == expected
    (here / "text.txt").write_text(other)
    small_run("--text=text.txt", out_dir="c")
    small_run("--text=text.txt", "--val_fraction=0.2", out_dir="d")
    assert len(calls) == 3
    (here / "text.txt").write_text(text)
    small_run("--text=text.txt", out_dir="e")
    assert len(calls) == 3, "what a or b may still need was kept"


@pytest.mark.parametrize("damage", ["train.bin", "tokenizer.json", "meta.json"])
def test_a_damaged_preparation_of_ours_is_made_again(damage: str, here: Path) -> None:
    (here / "text.txt").write_text("some text to train on, again and again. " * 20)
    small_run("--text=text.txt", out_dir="a")
    [folder] = (here / "prepared").iterdir()
    whole = (folder / damage).read_bytes()
    for number, content in enumerate((whole[:-2], whole[:-2] + b"zz", None)):
        if content is None:
            (folder / damage).unlink()
        else:
            (folder / damage).write_bytes(content)
        small_run("--text=text.txt", out_dir=f"b{number}")
        assert (folder / damage).read_bytes() == whole


def test_D13_a_token_file_that_was_changed_is_refused(here: Path, char_data: Path) -> None:
    bad = copy_of(char_data, here / "bad")
    content = bytearray((bad / "val.bin").read_bytes())
    content[:2], content[2:4] = content[2:4], content[:2]
    (bad / "val.bin").write_bytes(content)
    assert_clean_error(run_train("--data_dir=bad", "--out_dir=run", *NOTHING), "val.bin", "sha256")


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_D06_parsed_markers_are_documents_wherever_the_reading_is_cut(
    tokenizer: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "text.txt").write_text("one<|endoftext|>two <|endoftext|> three<|end " * 20)
    for size in (5, 13, 1 << 20):
        monkeypatch.setattr(data.sources, "PIECE_BYTES", size)
        outcome = run_prepare(
            "text.txt", f"--tokenizer={tokenizer}", "--vocab_size=300", "--out_dir=out", "--parse_special"
        )
        assert outcome.status == 0 and "41 documents" in outcome.stdout
        prepared = PreparedData(here / "out")
        assert prepared_ids(here / "out").count(prepared.tokenizer.end_of_text) == 41 == prepared.metadata.documents


@pytest.mark.parametrize("encoding", ["utf-16", "undefined"])
def test_D02_an_encoding_that_cannot_be_is_a_clean_error(encoding: str, here: Path) -> None:
    (here / "text.txt").write_bytes(b"no mark of UTF-16 here")
    assert_clean_error(run_prepare("text.txt", f"--encoding={encoding}", "--out_dir=out"), encoding)
    assert not (here / "out").exists()


def test_D08_without_network_nothing_is_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    def offline(name: str) -> None:
        raise ConnectionError("Max retries exceeded")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    (here / "text.txt").write_text(ACCENTED, encoding="utf-8")
    assert_clean_error(run_prepare("text.txt", "--tokenizer=gpt2", "--out_dir=out"), "TIKTOKEN_CACHE_DIR", "char")
    assert sorted(path.name for path in here.iterdir()) == ["text.txt"]


@pytest.mark.parametrize("name", ["x" * 400, "a\0b"])
def test_D17_a_name_that_no_file_can_have_is_a_clean_error(name: str, here: Path) -> None:
    outcome = run_prepare(name, "--out_dir=out")
    assert outcome.status == 2 and "Traceback" not in outcome.stderr and outcome.stderr.count("\n") == 1


def test_a_small_text_gets_the_bpe_ids_that_it_has_pairs_for_and_is_told(here: Path) -> None:
    (here / "text.txt").write_text("ab ab ab")
    outcome = run_prepare("text.txt", "--vocab_size=1000", "--out_dir=out", "--val_fraction=0")
    meta = read_metadata(here / "out")
    assert meta.vocab_size < 300 and f"{meta.vocab_size} of the 1,000 ids" in outcome.stdout


def test_metadata_counts_and_hashes_are_those_of_the_files(char_data: Path) -> None:
    meta: Metadata = read_metadata(char_data)
    for name, digest in (("train.bin", meta.train_sha256), ("val.bin", meta.val_sha256)):
        assert hashlib.sha256((char_data / name).read_bytes()).hexdigest() == digest
    text = PreparedData(char_data).tokenizer.decode(prepared_ids(char_data))
    assert (meta.characters, meta.bytes, meta.documents) == (len(text), len(text.encode()), 1)


def test_D09_merges_of_a_large_text_are_learned_from_pieces_spread_over_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(_spread(map(str, range(10)), 1.0)) == [str(i) for i in range(10)]
    assert list(_spread(map(str, range(9)), 1 / 3)) == ["0", "3", "6"]
    assert len(list(_spread(map(str, range(1000)), 0.37))) == pytest.approx(370, abs=1)
    (here / "text.txt").write_text("the cat sat on the mat\n" * 100_000, encoding="utf-8")
    merges = []
    for limit in (1 << 26, 1 << 20):
        monkeypatch.setattr("data.preparation.BPE_LEARNS_FROM", limit)
        outcome = run_prepare("text.txt", "--tokenizer=bpe", "--vocab_size=270", f"--out_dir={limit}")
        assert outcome.status == 0, outcome.stderr
        merges.append((here / str(limit) / "tokenizer.json").read_text(encoding="utf-8"))
    assert merges[0] == merges[1], "the same text everywhere teaches the same merges"


def test_D10_only_a_tokenizer_that_learns_from_the_text_reads_it_first(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def counted(*arguments: Any) -> Iterator[Iterator[str]]:
        read.append(arguments[0].name)
        return read_documents(*arguments)

    monkeypatch.setattr("data.preparation.read_documents", counted)
    monkeypatch.setattr("data.preparation.CHARACTERS_AT_ONCE", 100)
    monkeypatch.setattr("data.sources.PIECE_BYTES", 64)
    text = "the cat sat on the mât\n" * 100
    for tokenizer, passes in (("char", 2), ("bpe", 2), ("byte", 1), (str(here / "bpe" / "tokenizer.json"), 1)):
        read.clear()
        (here / "text.txt").write_text(text, encoding="utf-8")
        outcome = run_prepare(
            "text.txt", f"--tokenizer={tokenizer}", "--vocab_size=260", f"--out_dir={Path(tokenizer).stem}"
        )
        assert outcome.status == 0, outcome.stderr
        assert len(read) == passes, tokenizer
        assert f"{len(text):,} characters, {len(text.encode()):,} bytes" in outcome.stdout


def test_preparing_does_not_wait_for_torch(here: Path) -> None:
    """Which takes as long to import as preparing a small text does."""
    (here / "text.txt").write_text(ACCENTED, encoding="utf-8")
    code = "import sys, prepare; prepare.main(sys.argv[1:]); print('torch' in sys.modules)"
    options = (str(here / "text.txt"), f"--out_dir={here / 'out'}")
    result = subprocess.run(
        [sys.executable, "-c", code, *options], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.stdout.endswith("\nFalse\n"), result.stdout + result.stderr
