"""A prepared folder: token files, metadata and tokenizer, and the checks that make them trustworthy.

    train.bin, val.bin   flat little-endian uint16 or uint32, by vocabulary size
    meta.json            `Metadata`
    tokenizer.json       the tokenizer itself

Knows how they are laid out and read; data/preparation.py writes them.
"""

import hashlib
import io
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from config.errors import UserError
from data.tokenizers import Tokenizer, tokenizer_from_json

SCAN_TOKENS = 1 << 22


class Metadata(BaseModel):
    """What a prepared folder says about itself.

    Attributes:
        tokenizer, tokenizer_sha256: name and identity of the tokenizer.
        requested_vocab_size: the bpe vocabulary that was asked for; the text may have given fewer ids.
        dtype: of the token files.
        documents: documents in the token stream, each followed by one end-of-text id.
        characters, bytes: of the text, after the newline rule.
        source_sha256: of the documents' names and contents.
        train_sha256, val_sha256: of the token files.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format_version: Literal[1] = 1
    source: str
    source_sha256: str
    documents: int = Field(ge=1)
    characters: int = Field(ge=0)
    bytes: int = Field(ge=0)
    encoding: str
    parse_special: bool
    tokenizer: str
    tokenizer_sha256: str
    requested_vocab_size: int = Field(ge=1)
    vocab_size: int = Field(ge=2)
    dtype: Literal["uint16", "uint32"]
    val_fraction: float = Field(ge=0, lt=1)
    train_tokens: int = Field(ge=0)
    val_tokens: int = Field(ge=0)
    train_sha256: str
    val_sha256: str


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The narrowest type that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def to_stored(ids: npt.NDArray[np.uint32], dtype: str) -> npt.NDArray[np.unsignedinteger]:
    """Ids as they are stored, little-endian.

    Raises:
        ValueError: an id does not fit the type (it would wrap round and become another token).
    """
    if len(ids) and int(ids.max()) > np.iinfo(dtype).max:
        raise ValueError(f"token id {int(ids.max())} does not fit {dtype}")
    return ids.astype(np.dtype(dtype).newbyteorder("<"))


class TokenFile:
    """One .bin file, read piece by piece: nothing is mapped, so memory stays flat however long a run is.

    Args:
        path: the file.
        dtype: uint16 or uint32.
        vocab_size: every id must be below it.
        expected_tokens, expected_sha256: what the metadata says of it.

    Raises:
        UserError: the file is missing or another one, or holds an id that the vocabulary has not.
    """

    def __init__(self, path: Path, dtype: str, vocab_size: int, expected_tokens: int, expected_sha256: str) -> None:
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        try:
            self.file = io.FileIO(path, "rb")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); prepare the data again") from None
        self.length, rest = divmod(path.stat().st_size, self.dtype.itemsize)
        if rest or self.length != expected_tokens:
            raise UserError(
                f"{path}: {path.stat().st_size:,} bytes, but meta.json says {expected_tokens:,} tokens of {dtype}; "
                f"prepare the data again"
            )
        largest, digest = -1, hashlib.sha256()
        for start in range(0, self.length, SCAN_TOKENS):
            tokens = self.read(start, SCAN_TOKENS)
            largest = max(largest, int(tokens.max()))
            digest.update(tokens.data)
        if largest >= vocab_size:
            raise UserError(
                f"{path}: holds the token id {largest}, but vocab_size is {vocab_size}, so ids end at "
                f"{vocab_size - 1}; prepare the data again with the tokenizer that belongs to it"
            )
        if digest.hexdigest() != expected_sha256:
            raise UserError(f"{path}: is not the file that meta.json belongs to (sha256); prepare the data again")

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, count: int) -> npt.NDArray[np.unsignedinteger]:
        """Tokens start ... start + count - 1, fewer at the end of the file."""
        tokens = np.empty(max(0, min(count, self.length - start)), dtype=self.dtype)
        self._read_into(start, tokens)
        return tokens

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """The windows of so many tokens that begin at `starts`: (B,) -> (B, length)."""
        tokens = np.empty((len(starts), length), dtype=self.dtype)
        for row, start in zip(tokens, starts.tolist(), strict=True):
            self._read_into(start, row)
        return tokens.astype(np.int64)

    def _read_into(self, start: int, tokens: npt.NDArray[np.unsignedinteger]) -> None:
        self.file.seek(start * self.dtype.itemsize)
        if self.file.readinto(tokens) != tokens.nbytes:  # type: ignore[arg-type]  # an array is a buffer
            raise UserError(f"{self.path}: became shorter while it was read; prepare the data again")


class PreparedData:
    """An opened prepared folder.

    Attributes:
        folder, metadata, tokenizer, train, validation.

    Raises:
        UserError: a file is missing, or does not hold what meta.json says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = read_metadata(folder)
        path = folder / "tokenizer.json"
        try:
            self.tokenizer: Tokenizer = tokenizer_from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read as a tokenizer ({error}); prepare the data again") from None
        if self.tokenizer.sha256() != self.metadata.tokenizer_sha256:
            raise UserError(f"{path}: is not the tokenizer that meta.json belongs to; prepare the data again")
        meta = self.metadata
        if self.tokenizer.vocab_size != meta.vocab_size or meta.val_tokens == 1:
            raise UserError(
                f"{folder / 'meta.json'}: its counts are not those of a preparation; prepare the data again"
            )
        self.train = TokenFile(folder / "train.bin", meta.dtype, meta.vocab_size, meta.train_tokens, meta.train_sha256)
        self.validation = TokenFile(folder / "val.bin", meta.dtype, meta.vocab_size, meta.val_tokens, meta.val_sha256)


def read_metadata(folder: Path) -> Metadata:
    """meta.json of a prepared folder.

    Raises:
        UserError: it is missing or says something impossible; the vocabulary is never guessed.
    """
    path = folder / "meta.json"
    try:
        return Metadata.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); expected a folder that prepare.py wrote, as the vocabulary "
            f"size is taken from there and never guessed"
        ) from None
    except (ValidationError, UnicodeDecodeError) as error:
        detail = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        place = ".".join(map(str, detail["loc"]))
        raise UserError(f"{path}: {place or 'content'}: {detail['msg']}; prepare the data again") from None


def refuse_other_data(data: PreparedData, saved: dict[str, Any]) -> None:
    """A run goes on only with its own tokenizer and its own tokens.

    Raises:
        UserError: naming both.
    """
    meta = data.metadata
    advice = "prepare it as before, or start a new run with another --out_dir"
    if meta.tokenizer_sha256 != saved["tokenizer_sha256"]:
        raise UserError(
            f"{data.folder}: its tokenizer is {meta.tokenizer} with {meta.vocab_size} ids "
            f"({meta.tokenizer_sha256[:8]}), the run was trained with {saved['tokenizer']} with "
            f"{saved['vocab_size']} ids ({saved['tokenizer_sha256'][:8]}); {advice}"
        )
    for name in ("train_sha256", "val_sha256"):
        if getattr(meta, name) != saved[name]:
            raise UserError(
                f"{data.folder}: its tokens have {name} {getattr(meta, name)[:8]}, those of the run "
                f"{saved[name][:8]}; {advice}"
            )
