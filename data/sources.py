"""Where text comes from: a file, a folder, a glob, standard input, or a text that is built in.

A source is a list of documents in a stated order (sorted by path). Knows nothing of tokens.
"""

import codecs
import contextlib
import glob
import gzip
import hashlib
import io
import json
import platform
import shutil
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from config.errors import UserError, reason_of
from data.download import download

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip", ".7z")
PIECE_BYTES = 1 << 20  # text is read in pieces of this size, whatever the size of the file

STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "encodings", "idlelib", "tkinter", "lib2to3", "site-packages"}
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394


@dataclass(frozen=True)
class Document:
    """One text: the name it goes by, and the file that holds it."""

    name: str
    path: Path


@dataclass(frozen=True)
class Source:
    """Documents in their order, and a line on where they are from."""

    name: str
    description: str
    documents: list[Document]

    def size(self) -> int:
        """Bytes in all documents."""
        return sum(document.path.stat().st_size for document in self.documents)

    @cached_property
    def sha256(self) -> str:
        """A hash of the documents' names and contents; a lone document may be renamed, but not into another kind."""
        digest = hashlib.sha256()
        for document in self.documents:
            with document.path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            name = document.name if len(self.documents) > 1 else "".join(kind_of(document.path))
            digest.update(f"{name}\0{content}\n".encode("utf-8", errors="surrogateescape"))
        return digest.hexdigest()


def kind_of(path: Path) -> tuple[str, str]:
    """How a file is read: ".jsonl" or "" for one text, and ".gz" or "" for one that is not packed.

    Raises:
        UserError: it is an archive of files.
    """
    name = path.name.lower()
    if name.endswith(ARCHIVES):
        raise UserError(f"{path}: is an archive; unpack it first, and name the folder")
    unpacked = name.removesuffix(".gz")
    return ".jsonl" if unpacked.endswith((".jsonl", ".ndjson")) else "", ".gz" if unpacked != name else ""


@contextlib.contextmanager
def open_source(name: str, downloads: Path) -> Iterator[Source]:
    """The documents that a name stands for; standard input and pipes are kept in a file while the block runs.

    Args:
        name: a path, a glob, "-" for standard input, "stdlib" or "shakespeare". A file or folder of that
            name goes before the built-in text.
        downloads: where a downloaded text is kept.

    Raises:
        UserError: nothing is there, or nothing is in it.
    """
    path = Path(name)
    with tempfile.TemporaryDirectory() as spool:
        if name == "-" or (path.exists() and not path.is_file() and not path.is_dir()):  # a pipe, like <(command)
            source = _spooled(name, Path(spool) / "stdin")
        elif path.is_dir():
            inside = [(file.relative_to(path), file) for file in path.rglob("*") if file.is_file()]
            source = _source_of(name, f"folder {name}", [(rel, file) for rel, file in inside if not _hidden(rel)])
        elif path.exists():
            source = _source_of(name, f"file {name}", [(Path(path.name), path)])
        elif name == "stdlib":
            source = _stdlib()
        elif name == "shakespeare":
            source = _shakespeare(downloads)
        elif glob.has_magic(name):
            found = [Path(file) for file in glob.iglob(name, recursive=True)]  # noqa: PTH207 - absolute ones too
            source = _source_of(name, f"files {name}", [(file, file) for file in found if file.is_file()])
        else:
            raise UserError(f"{name}: no such file or folder; expected text to read, -, stdlib or shakespeare")
        if not source.documents:
            raise UserError(f"{source.name}: there are no files in it; expected at least one text")
        if source.size() == 0:
            raise UserError(f"{source.name}: is empty; expected some text")
        yield source


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _source_of(name: str, description: str, files: list[tuple[Path, Path]]) -> Source:
    """Documents sorted by the name that each goes by."""
    documents = sorted((known_as.as_posix(), file) for known_as, file in files)
    return Source(name, description, [Document(known_as, file) for known_as, file in documents])


def _spooled(name: str, copy: Path) -> Source:
    with copy.open("wb") as target:
        if name == "-":
            if sys.stdin is None:
                raise UserError("standard input: is closed; expected text on it")
            shutil.copyfileobj(sys.stdin.buffer, target)
        else:
            with Path(name).open("rb") as pipe:
                shutil.copyfileobj(pipe, target)
    shown = "standard input" if name == "-" else name
    return Source(shown, shown, [Document("stdin", copy)])


def _stdlib() -> Source:
    """The Python standard library's own source on this machine, tests and tables left out."""
    root = Path(sysconfig.get_path("stdlib"))
    named = [(file.relative_to(root), file) for file in root.rglob("*.py")]
    files = [(name, file) for name, file in named if not STDLIB_LEFT_OUT.intersection(name.parts)]
    if not files:
        raise UserError(f"stdlib: this Python has no source files in {root}; name a text of your own instead")
    return _source_of("stdlib", f"the standard library of Python {platform.python_version()}", files)


def _shakespeare(downloads: Path) -> Source:
    """Tiny Shakespeare (Karpathy 2015), 1.1 million characters."""
    path = downloads / "tinyshakespeare.txt"
    if not path.exists():
        download(SHAKESPEARE_URL, path, sha256=SHAKESPEARE_SHA256, size=SHAKESPEARE_BYTES)
    return _source_of("shakespeare", "Tiny Shakespeare", [(Path(path.name), path)])


Told = Callable[[int], object]


def read_documents(
    document: Document, encoding: str, text_field: str = "text", on_read: Told = lambda count: None
) -> Iterator[Iterator[str]]:
    """The texts in a file, each in pieces; `on_read` is told the bytes of the file as they are read.

    A file is one text; one of the name .jsonl has one a line, in a field of its JSON object. With .gz after it, either
    is unpacked on the way.

    Raises:
        UserError: the file is not in that encoding (with the place), damaged, or a line is not such an object.
        OSError: it cannot be read.
    """
    lines, packed = kind_of(document.path)
    with document.path.open("rb", buffering=0) as raw:
        stored = io.BufferedReader(_Told(raw, on_read), PIECE_BYTES)
        file: IO[bytes] = gzip.GzipFile(fileobj=stored) if packed else stored  # type: ignore[assignment]
        if lines:
            texts = _json_lines(document, file, encoding, text_field)
            yield from (iter((text,)) for text in _undamaged(document, texts))
        else:
            yield _undamaged(document, read_text(document, file, encoding))


def _undamaged(document: Document, texts: Iterator[str]) -> Iterator[str]:
    try:
        yield from texts
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{document.path}: damaged gzip file ({reason_of(error)})") from None


class _Told(io.RawIOBase):
    """A file that tells how much of it was read."""

    def __init__(self, file: io.FileIO, on_read: Told) -> None:
        self.file, self.on_read = file, on_read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self.file.readinto(buffer)
        self.on_read(count)
        return count


def _json_lines(document: Document, file: IO[bytes], encoding: str, text_field: str) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        place = f"{document.path}: line {number}"
        try:
            content = json.loads(line.decode(encoding).removeprefix("\ufeff"))
        except UnicodeError as error:
            raise UserError(f"{place}: not {encoding} text ({reason_of(error)}); name its --encoding") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: not JSON ({reason_of(error)}); expected one object a line") from None
        if not isinstance(content, dict) or text_field not in content:
            raise UserError(f"{place}: expected an object with the field {text_field}; name another with --text_field")
        text = content[text_field]
        if not isinstance(text, str):
            raise UserError(f"{place}: its field {text_field} holds no text")
        yield same_newlines(text)


def read_text(document: Document, file: IO[bytes], encoding: str) -> Iterator[str]:
    """A text, in pieces of at most PIECE_BYTES bytes.

    A byte-order mark at the start is dropped and CRLF line ends become LF; all else stays as it is (a lone
    CR, composed and decomposed characters). `same_newlines` applies the same rule to a prompt.

    Raises:
        UserError: the file is not in that encoding (with the place).
        OSError: it cannot be read.
    """
    decoder = codecs.getincrementaldecoder(encoding)(errors="strict")
    position, pending, carried, at_start = 0, 0, "", True
    try:
        while data := file.read(PIECE_BYTES):
            pending = len(decoder.getstate()[0])
            text = carried + decoder.decode(data)
            position += len(data)
            if at_start and text:
                text, at_start = text.removeprefix("\ufeff"), False
            # A CR at the end may be half of a CRLF.
            carried = "\r" if text.endswith("\r") else ""
            yield same_newlines(text[: len(text) - len(carried)])
        pending = len(decoder.getstate()[0])
        yield same_newlines(carried + decoder.decode(b"", final=True))
    except UnicodeError as error:  # some codecs give no place
        place = f"byte {position - pending + error.start}: " if isinstance(error, UnicodeDecodeError) else ""
        reason = error.reason if isinstance(error, UnicodeDecodeError) else reason_of(error)
        raise UserError(
            f"{document.path}: not {encoding} text ({place}{reason}); "
            f"name its encoding, for example --encoding=latin-1, or leave the file out"
        ) from None


def same_newlines(text: str) -> str:
    """The newline rule of `read_text`: CRLF becomes LF, a lone CR stays."""
    return text.replace("\r\n", "\n")
