"""Where text comes from: a file, a folder, a glob, standard input, or a text that is built in.

A source is a list of documents in a stated order (sorted by path). Knows nothing of tokens.
"""

import codecs
import glob
import hashlib
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from config.errors import UserError
from data.download import download

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

    def sha256(self) -> str:
        """A hash of names, sizes and contents: equal if and only if the source is the same."""
        digest = hashlib.sha256()
        for document in self.documents:
            with document.path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            name = document.name if len(self.documents) > 1 else ""  # a lone file may be renamed
            digest.update(f"{name}\0{content}\n".encode("utf-8", errors="surrogateescape"))
        return digest.hexdigest()


def open_source(name: str, downloads: Path, spool: Callable[[], Path]) -> Source:
    """The documents that a name stands for.

    Args:
        name: a path, a glob, "-" for standard input, "stdlib" or "shakespeare". A file or folder of that
            name goes before the built-in text.
        downloads: where a downloaded text is kept.
        spool: gives a new file to copy standard input to, as it can be read only once.

    Raises:
        UserError: nothing is there, or nothing is in it.
    """
    path = Path(name)
    if is_stream(name):
        source = _spooled(name, spool())
    elif path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path))]
        source = _source_of(name, f"folder {name}", path, files)
    elif path.exists():
        source = Source(name, f"file {name}", [Document(path.name, path)])
    elif name in BUILT_IN:
        source = BUILT_IN[name](downloads)
    elif glob.has_magic(name):
        files = [Path(file) for file in glob.iglob(name, recursive=True) if Path(file).is_file()]  # noqa: PTH207 - absolute too
        source = _source_of(name, f"files {name}", Path(), files)
    else:
        raise UserError(
            f"{name}: no such file or folder; expected text to read, - for standard input, or {' or '.join(BUILT_IN)}"
        )
    _refuse_empty(source)
    return source


def is_stream(name: str) -> bool:
    """Whether a source can be read only once: standard input, or a pipe like <(command)."""
    path = Path(name)
    return name == "-" or (path.exists() and not path.is_file() and not path.is_dir())


def _refuse_empty(source: Source) -> None:
    if not source.documents:
        raise UserError(f"{source.name}: there are no files in it; expected at least one text")
    try:
        empty = source.size() == 0
    except OSError as error:
        raise UserError(f"{source.name}: cannot be read: {error.strerror}") from None
    if empty:
        raise UserError(f"{source.name}: is empty; expected some text")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _source_of(name: str, description: str, root: Path, files: list[Path]) -> Source:
    documents = sorted((file.relative_to(root).as_posix(), file) for file in files)
    return Source(name, description, [Document(relative, file) for relative, file in documents])


def _spooled(name: str, copy: Path) -> Source:
    with copy.open("wb") as target:
        if name == "-":
            shutil.copyfileobj(sys.stdin.buffer, target)
        else:
            with Path(name).open("rb") as pipe:
                shutil.copyfileobj(pipe, target)
    description = "standard input" if name == "-" else f"pipe {name}"
    return Source(description, description, [Document("stdin", copy)])


def _stdlib(downloads: Path) -> Source:
    """The Python standard library's own source on this machine, tests and tables left out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in root.rglob("*.py") if not STDLIB_LEFT_OUT.intersection(file.relative_to(root).parts)]
    if not files:
        raise UserError(f"stdlib: this Python has no source files in {root}; name a text of your own instead")
    return _source_of("stdlib", f"the standard library of Python {platform.python_version()}", root, files)


def _shakespeare(downloads: Path) -> Source:
    """Tiny Shakespeare (Karpathy 2015), 1.1 million characters."""
    path = downloads / "tinyshakespeare.txt"
    if not path.exists():
        download(SHAKESPEARE_URL, path, sha256=SHAKESPEARE_SHA256, size=SHAKESPEARE_BYTES)
    return Source("shakespeare", "Tiny Shakespeare", [Document(path.name, path)])


BUILT_IN = {"stdlib": _stdlib, "shakespeare": _shakespeare}


def read_text(
    document: Document, encoding: str, on_read: Callable[[int], object] = lambda count: None
) -> Iterator[str]:
    """A document's text, in pieces of at most PIECE_BYTES bytes; `on_read` is told the bytes of each.

    A byte-order mark at the start is dropped and CRLF line ends become LF; all else stays as it is (a lone
    CR, composed and decomposed characters). `same_newlines` applies the same rule to a prompt.

    Raises:
        UserError: the file is not in that encoding (with the place), or cannot be read.
    """
    decoder = codecs.getincrementaldecoder(encoding)(errors="strict")
    position, carried, at_start = 0, "", True
    try:
        with document.path.open("rb") as file:
            while data := file.read(PIECE_BYTES):
                pending = len(decoder.getstate()[0])
                text = carried + decoder.decode(data)
                position += len(data)
                on_read(len(data))
                if at_start and text:
                    text, at_start = text.removeprefix("\ufeff"), False
                # A CR at the end may be half of a CRLF.
                carried = "\r" if text.endswith("\r") else ""
                yield same_newlines(text[: len(text) - len(carried)])
        pending, data = len(decoder.getstate()[0]), b""
        decoder.decode(b"", final=True)
        yield carried
    except UnicodeDecodeError as error:
        raise UserError(
            f"{document.path}: not {encoding} text (byte {position - pending + error.start}: {error.reason}); "
            f"name its encoding, for example --encoding=latin-1, or leave the file out"
        ) from None
    except OSError as error:
        raise UserError(f"{document.path}: cannot be read: {error.strerror}") from None


def same_newlines(text: str) -> str:
    """The newline rule of `read_text`: CRLF becomes LF, a lone CR stays."""
    return text.replace("\r\n", "\n")
