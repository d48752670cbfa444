"""Data as people have it: gzip, JSONL, folders of both; each is one text or many, in a stated order."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from config.preparation import PrepareSettings
from data.dataset import PreparedData
from data.preparation import prepare
from data.sources import Document, open_source, read_documents
from data.tokenizers import ByteTokenizer
from tests.conftest import TEXT, Outcome, assert_clean_error, run_prepare

TEXTS = ["first\r\ntext", "둘째 글 👩‍👩‍👧", "", "third\rone\n"]


def read(path: Path, encoding: str = "utf-8", field: str = "text") -> list[str]:
    return ["".join(pieces) for pieces in read_documents(Document(path.name, path), encoding, field)]


def json_lines(texts: list[str], field: str = "text") -> str:
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))


def test_gzip_is_unpacked_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(("\ufeff" + TEXT * 20).replace("\n", "\r\n").encode()))
    assert read(tmp_path / "a.txt.gz") == [TEXT * 20], "under the same rules as plain text"


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JSONL", "a.jsonl.gz"])
def test_each_line_of_jsonl_is_a_text(name: str, tmp_path: Path) -> None:
    content = ("\ufeff" + json_lines(TEXTS[:2]) + "\n  \n" + json_lines(TEXTS[2:])).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read(tmp_path / name) == [text.replace("\r\n", "\n") for text in TEXTS]


def test_the_field_of_the_text_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json_lines(TEXTS, "content"), encoding="utf-8")
    assert len(read(tmp_path / "a.jsonl", field="content")) == 4
    options = ("--tokenizer=byte", "--text_field=content", f"--out_dir={tmp_path / 'data'}")
    assert run_prepare(str(tmp_path / "a.jsonl"), *options).status == 0


def test_a_folder_of_all_kinds_is_read_in_the_order_of_its_paths(here: Path) -> None:
    (here / "texts/b").mkdir(parents=True)
    (here / "texts/a.txt").write_text("plain", encoding="utf-8")
    (here / "texts/b/c.txt.gz").write_bytes(gzip.compress(b"packed"))
    (here / "texts/d.jsonl").write_text(json_lines(["one", "two"]), encoding="utf-8")
    assert run_prepare("texts", "--tokenizer=byte", "--val_fraction=0", "--out_dir=data").status == 0
    data = PreparedData(here / "data")
    assert data.tokenizer.decode(data.train.read(0, 1000), show_special=True) == "".join(
        f"{text}<|endoftext|>" for text in ("plain", "packed", "one", "two")
    )
    assert data.metadata.documents == 4 and data.metadata.characters == len("plainpackedonetwo")
    glob = run_prepare("texts/**/*.txt*", "--tokenizer=byte", "--val_fraction=0", "--out_dir=globbed")
    assert glob.status == 0 and PreparedData(here / "globbed").metadata.documents == 2


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_packed_and_in_lines_a_text_gives_the_same_tokens(tokenizer: str, here: Path) -> None:
    (here / "text.txt").write_text(TEXT, encoding="utf-8")
    (here / "text.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    (here / "text.jsonl").write_text(json_lines([TEXT]), encoding="utf-8")
    hashes = set()
    for name in ("text.txt", "text.txt.gz", "text.jsonl"):
        outcome = run_prepare(name, f"--tokenizer={tokenizer}", "--vocab_size=300", "--out_dir=data")
        assert outcome.status == 0, outcome.stderr
        metadata = PreparedData(here / "data").metadata
        hashes.add((metadata.train_sha256, metadata.val_sha256, metadata.tokenizer_sha256, metadata.documents))
    assert len(hashes) == 1


def test_many_documents_of_a_line_each_are_prepared_as_one_text_each(here: Path) -> None:
    """More of them than are encoded at once."""
    texts = [f"document {i}" for i in range(9000)]
    (here / "a.jsonl").write_text(json_lines(texts), encoding="utf-8")
    with open_source("a.jsonl", here) as source:
        metadata = prepare(source, PrepareSettings(tokenizer="bpe", vocab_size=300, val_fraction=0), here / "data")
    data = PreparedData(here / "data")
    decoded = data.tokenizer.decode(data.train.read(0, 10**7), show_special=True).split("<|endoftext|>")
    assert decoded == [*texts, ""] and metadata.documents == 9000


def test_only_so_many_pieces_are_held_at_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    real = ByteTokenizer.encode_batch

    def counting(self: ByteTokenizer, texts: list[str], *, parse_special: bool = False) -> Any:
        held.append(len(texts))
        return real(self, texts, parse_special=parse_special)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", counting)
    monkeypatch.setattr("data.preparation.PIECES_AT_ONCE", 10)
    (here / "a.jsonl").write_text(json_lines([str(i) for i in range(200)]), encoding="utf-8")
    assert run_prepare("a.jsonl", "--tokenizer=byte", "--out_dir=data").status == 0
    assert max(held) <= 14 and sum(held) == 400, "two pieces a document"


def test_the_same_bytes_under_a_name_of_another_kind_are_another_preparation(here: Path) -> None:
    content = json_lines(["one", "two"] * 30)
    folders = {}
    for name in ("a.txt", "a.jsonl", "b.txt"):
        (here / name).write_text(content, encoding="utf-8")
        outcome = run_prepare(name, "--tokenizer=byte")
        folders[name] = outcome.stdout.split("--data_dir=")[1].strip()
    assert PreparedData(Path(folders["a.jsonl"])).metadata.documents == 60
    assert PreparedData(Path(folders["a.txt"])).metadata.documents == 1
    assert folders["a.txt"].split("-")[-1] == folders["b.txt"].split("-")[-1], "a text may be renamed"


def broken(path: str, content: bytes, *words: str) -> tuple[str, bytes, tuple[str, ...]]:
    return path, content, words


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        broken("a.txt.gz", b"not gzip", "a.txt.gz", "damaged gzip"),
        broken("a.txt.gz", gzip.compress(TEXT.encode())[:-20], "a.txt.gz", "damaged gzip"),
        broken("a.txt.gz", gzip.compress(b"\xff\xfe\xfa"), "a.txt.gz", "not utf-8 text (byte 0"),
        broken("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl: line 2", "not JSON"),
        broken("a.jsonl", b'{"text": "a"}\n{"content": "b"}\n', "a.jsonl: line 2", "--text_field"),
        broken("a.jsonl", b'["text"]\n', "a.jsonl: line 1", "expected an object with the field text"),
        broken("a.jsonl", b'{"text": 5}\n', "a.jsonl: line 1", "holds no text"),
        broken("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl: line 1", "not utf-8 text"),
        broken("a.tar.gz", gzip.compress(b"x"), "a.tar.gz: is an archive"),
        broken("a.jsonl", b'{"text": "\\ud800"}\n', "half a surrogate pair"),
        broken("a.jsonl", b'{"text": ""}\n', "holds no text"),
        broken("a.jsonl", b"[" * 100_000 + b"\n", "a.jsonl: line 1"),
    ],
)
def test_damaged_files_are_named_with_the_place(name: str, content: bytes, words: tuple[str, ...], here: Path) -> None:
    (here / name).write_bytes(content)
    outcome: Outcome = run_prepare(name, "--tokenizer=byte", "--out_dir=data")
    assert_clean_error(outcome, *words)
    assert not (here / "data").exists()


def test_progress_counts_the_bytes_of_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(TEXT.encode() * 1000))
    counted: list[int] = []
    for pieces in read_documents(Document("a", path), "utf-8", on_read=counted.append):
        list(pieces)
    assert sum(counted) == path.stat().st_size < len(TEXT) * 100
