"""Text -> a prepared folder, in bounded memory whatever the size of the text.

One pass for a tokenizer that learns from the text, then one that encodes. Documents keep their order; exactly one
end-of-text id follows each. The last `val_fraction` of the tokens is for validation.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from config.errors import UserError
from config.preparation import PreparationFields
from data.dataset import Metadata, PreparedData, read_metadata, to_stored, token_dtype
from data.files import staging_folder
from data.patterns import BPE_PATTERN, last_safe_cut
from data.sources import Source, open_source, read_documents
from data.tokenizer_files import tokenizer_from_file
from data.tokenizers import (
    CORES,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    named_encoding,
    train_bpe,
)

DATA = Path(__file__).parent
PREPARED, DOWNLOADS = DATA / "prepared", DATA / "downloads"

FILES = ("train.bin", "val.bin", "tokenizer.json", "meta.json")  # the last makes the folder valid
STAGING_PREFIX = ".preparing-"
PIECE_LIMIT = 1 << 26  # characters without a place to cut; more would be encoded in unbounded memory
CHARACTERS_AT_ONCE, PIECES_AT_ONCE = CORES << 23, 1 << 12
BPE_LEARNS_FROM = 1 << 26  # bytes; of a larger text, pieces spread evenly over it teach the same merges in less time


@dataclass
class Totals:
    """What was encoded."""

    characters: int = 0
    bytes: int = 0
    tokens: int = 0
    documents: int = 0


def prepare(
    source: Source, options: PreparationFields, out_dir: Path, given_tokenizer: Tokenizer | None = None
) -> Metadata:
    """Make a prepared folder, or leave nothing behind.

    Args:
        source: the text.
        options: tokenizer and split.
        out_dir: the folder; one that prepare wrote earlier is replaced.
        given_tokenizer: used instead of the one that the options name.

    Raises:
        UserError: the text, the tokenizer or the split cannot be had, or out_dir holds something else.
    """
    _check_encoding(options.encoding)
    _refuse_foreign_folder(out_dir, source)
    with _staging_folder(out_dir) as staging:
        tokenizer = given_tokenizer or _known_tokenizer(options.tokenizer) or _learned_tokenizer(source, options)
        dtype = token_dtype(tokenizer.vocab_size)
        totals = _encode_to_file(source, options, tokenizer, dtype, staging / "train.bin")
        val_tokens = _split(staging, totals.tokens, options.val_fraction, np.dtype(dtype).itemsize)
        (staging / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        metadata = Metadata(
            source=source.description,
            source_sha256=source.sha256,
            documents=totals.documents,
            characters=totals.characters,
            bytes=totals.bytes,
            encoding=options.encoding,
            parse_special=options.parse_special,
            tokenizer=tokenizer.name,
            tokenizer_sha256=tokenizer.sha256(),
            requested_vocab_size=options.vocab_size,
            vocab_size=tokenizer.vocab_size,
            dtype=dtype,
            val_fraction=options.val_fraction,
            train_tokens=totals.tokens - val_tokens,
            val_tokens=val_tokens,
            train_sha256=_file_sha256(staging / "train.bin"),
            val_sha256=_file_sha256(staging / "val.bin"),
        )
        (staging / "meta.json").write_text(metadata.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (out_dir / "meta.json").unlink(missing_ok=True)
        for name in FILES:
            (staging / name).replace(out_dir / name)
    return metadata


def prepare_if_needed(
    source_name: str, options: PreparationFields, given_tokenizer: Tokenizer | None = None
) -> PreparedData:
    """Exactly this text prepared in exactly this way: as it was earlier, or now.

    Args:
        source_name: as `open_source` takes it.
        options, given_tokenizer: as in `prepare`.

    Raises:
        UserError: as `open_source` and `prepare`.
    """
    with open_source(source_name, DOWNLOADS) as source:
        folder = default_folder(source, options, given_tokenizer)
        try:
            return PreparedData(folder)
        except UserError:  # not there, or damaged
            prepare(source, options, folder, given_tokenizer)
            return PreparedData(folder)


def default_folder(source: Source, options: PreparationFields, given_tokenizer: Tokenizer | None = None) -> Path:
    """Where a preparation goes when nobody says: another one for every text and every way to prepare it."""
    options_used = options.model_dump(include=set(PreparationFields.model_fields))
    tokenizer_file = Path(options.tokenizer)
    if given_tokenizer is not None:
        options_used["tokenizer"] = given_tokenizer.sha256()
    elif tokenizer_file.is_file():
        options_used["tokenizer"] = _file_sha256(tokenizer_file)
    identity = repr((source.sha256, options_used))
    digest = hashlib.sha256(identity.encode("utf-8")).hexdigest()[:12]
    return PREPARED / f"{safe_name(source.name)}-{safe_name(options.tokenizer)}-{digest}"


def safe_name(text: str) -> str:
    """A short file name that reminds of a text's or preset's name."""
    kept = "".join(c if c.isalnum() or c in "-_" else "_" for c in Path(text).stem).strip("_")
    return kept[:40] or "text"


def _check_encoding(encoding: str) -> None:
    try:
        "".encode(encoding)
    except (LookupError, UnicodeError):
        raise UserError(
            f"encoding = {encoding!r}: expected a text encoding that Python knows, such as utf-8, utf-16 or latin-1"
        ) from None


def _refuse_foreign_folder(out_dir: Path, source: Source) -> None:
    """Replace nothing but what prepare wrote, and never the text itself."""
    place = out_dir.resolve()
    for document in source.documents:
        if document.path.resolve().parent == place:
            raise UserError(f"{out_dir}: holds the text {document.path.name} itself; name another --out_dir")
    inside = [path.name for path in out_dir.iterdir()] if out_dir.is_dir() else []
    if out_dir.parent == PREPARED or not inside:
        return  # a folder of ours, perhaps damaged, or an empty one
    foreign = [name for name in inside if name not in FILES and not name.startswith(STAGING_PREFIX)]
    try:
        read_metadata(out_dir)
    except UserError:
        foreign = foreign or inside
    if foreign:
        raise UserError(f"{out_dir}: holds {foreign[0]}, so it is not a prepared folder; name another --out_dir")


@contextmanager
def _staging_folder(out_dir: Path) -> Iterator[Path]:
    try:
        with staging_folder(out_dir, STAGING_PREFIX) as staging:
            yield staging
    except OSError as error:
        if error.filename is not None:
            raise
        raise UserError(f"{out_dir}: cannot be written ({error.strerror}); nothing was kept") from None


def _pieces(
    source: Source, options: PreparationFields, safe_prefix: Callable[[str], int], progress: str
) -> Iterator[list[str | None]]:
    """All documents in pieces that can be encoded on their own, None at the end of each, as many at once as pays."""
    pieces: list[str | None] = []
    characters = 0
    with tqdm(total=source.size(), desc=progress, unit="B", unit_scale=True, leave=False) as bar:
        for document in source.documents:
            for texts in read_documents(document, options.encoding, options.text_field, bar.update):
                waiting = ""
                for text in texts:
                    waiting += text
                    cut = safe_prefix(waiting)
                    pieces.append(waiting[:cut])
                    waiting = waiting[cut:]
                    if len(waiting) > PIECE_LIMIT:
                        raise UserError(
                            f"{document.path}: more than {PIECE_LIMIT:,} characters without a place where the "
                            f"{options.tokenizer} tokenizer can cut them; use --tokenizer=char or byte"
                        )
                    characters += cut
                    if characters > CHARACTERS_AT_ONCE or len(pieces) > PIECES_AT_ONCE:
                        yield pieces
                        pieces, characters = [], 0
                pieces += [waiting, None]
        yield pieces


def _read_ahead(batches: Iterator[list[str | None]]) -> Iterator[list[str | None]]:
    """The same batches, of which the next is read while one is encoded."""
    with ThreadPoolExecutor(1) as reader:
        following = reader.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = reader.submit(next, batches, None)
            yield batch


def _learned_tokenizer(source: Source, options: PreparationFields) -> Tokenizer:
    """The vocabulary that a first pass over the text gives."""
    if options.tokenizer == "char":
        characters: set[str] = set()
        for piece in _texts(source, options, len):
            characters.update(piece)
        return CharTokenizer(characters)
    pieces = _texts(source, options, lambda text: last_safe_cut(text, BPE_PATTERN))
    return train_bpe(_spread(pieces, min(1.0, BPE_LEARNS_FROM / max(1, source.size()))), options.vocab_size)


def _texts(source: Source, options: PreparationFields, safe_prefix: Callable[[str], int]) -> Iterator[str]:
    """What the first pass reads: the pieces alone, each of whole characters."""
    for pieces in _pieces(source, options, safe_prefix, "reading"):
        for piece in filter(None, pieces):
            _byte_length(piece, source)
            yield piece


def _byte_length(piece: str, source: Source) -> int:
    try:
        return len(piece.encode("utf-8"))
    except UnicodeEncodeError:
        raise UserError(f"{source.name}: holds half a surrogate pair, which is no character") from None


def _known_tokenizer(name: str) -> Tokenizer | None:
    """A tokenizer that need not be learned from the text; None where it must."""
    if name in ("char", "bpe"):
        return None
    if name == "byte":
        return ByteTokenizer()
    path = Path(name)
    if path.is_file():
        return tokenizer_from_file(path)
    if path.is_dir() or path.parent != Path() or path.suffix in (".json", ".tiktoken"):
        found = "a folder" if path.is_dir() else "no such file"
        raise UserError(f"tokenizer = {name}: {found}; expected a tokenizer.json or a file of tiktoken's ranks")
    return named_encoding(name)


def _spread(pieces: Iterable[str], share: float) -> Iterator[str]:
    """So large a share of the pieces, spread evenly over all of them, the first among them."""
    due = 1.0 - share
    for piece in pieces:
        due += share
        if due >= 1.0:
            due -= 1.0
            yield piece


def _encode_to_file(source: Source, options: PreparationFields, tokenizer: Tokenizer, dtype: str, path: Path) -> Totals:
    """Write every document's ids and one end-of-text id, in order.

    Raises:
        UserError: there is no text, or it cannot be encoded.
    """
    special = options.parse_special
    end_of_text = np.array([tokenizer.end_of_text], dtype=np.uint32)
    totals = Totals()
    with path.open("wb") as file:
        cut = partial(tokenizer.safe_prefix, parse_special=special)
        for pieces in _read_ahead(_pieces(source, options, cut, "encoding")):
            texts = [piece for piece in pieces if piece is not None]
            totals.characters += sum(map(len, texts))
            totals.bytes += sum(_byte_length(text, source) for text in texts)
            encoded = iter(tokenizer.encode_batch(texts, parse_special=special))
            for piece in pieces:
                ids = end_of_text if piece is None else next(encoded)
                file.write(to_stored(ids, dtype).tobytes())
                totals.tokens += len(ids)
                totals.documents += int(np.count_nonzero(ids == tokenizer.end_of_text))
    if not totals.characters:
        raise UserError(f"{source.name}: holds no text")
    return totals


def _split(folder: Path, tokens: int, val_fraction: float, itemsize: int) -> int:
    """Move the last part of train.bin to val.bin; return its number of tokens.

    Raises:
        UserError: a part that is wanted would have no token to predict.
    """
    val_tokens = round(tokens * val_fraction)
    if val_fraction > 0 and val_tokens < 2:
        raise UserError(
            f"val_fraction = {val_fraction}: of {tokens} tokens that leaves {val_tokens} for validation, and 2 are "
            f"needed; use a larger share or more text, or 0 to train without validation"
        )
    if tokens - val_tokens < 2:
        raise UserError(f"{tokens} tokens in all, {val_tokens} of them for validation: too few to train on")
    with (folder / "train.bin").open("r+b") as train, (folder / "val.bin").open("wb") as val:
        train.seek((tokens - val_tokens) * itemsize)
        shutil.copyfileobj(train, val)
        train.truncate((tokens - val_tokens) * itemsize)
    return val_tokens


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
