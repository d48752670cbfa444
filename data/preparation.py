"""Text -> a prepared folder, in bounded memory whatever the size of the text.

Two passes: the first counts and gives the tokenizer what it learns from, the second encodes. Documents keep
their order; exactly one end-of-text id follows each. The last `val_fraction` of the tokens is for validation.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from config.errors import UserError
from config.schema import PreparationFields
from data.dataset import Metadata, read_metadata, to_stored, token_dtype
from data.sources import Source, is_stream, open_source, read_text
from data.tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer, named_encoding, train_bpe

DATA = Path(__file__).parent
PREPARED, DOWNLOADS = DATA / "prepared", DATA / "downloads"

PIECE_LIMIT = 1 << 26  # characters without a place to cut; more would be encoded in unbounded memory
PIECES_AT_ONCE = 2 * (os.cpu_count() or 1)


@dataclass
class Totals:
    """What the first pass counted."""

    characters: int = 0
    bytes: int = 0


def prepare(source_name: str, options: PreparationFields, out_dir: Path) -> Metadata:
    """Make a prepared folder, or leave nothing behind.

    Args:
        source_name: as `open_source` takes it.
        options: tokenizer and split.
        out_dir: the folder; one that prepare wrote earlier is replaced.

    Raises:
        UserError: the text, the tokenizer or the split cannot be had, or out_dir holds something else.
    """
    refuse_foreign_folder(out_dir)
    _check_encoding(options.encoding)
    with _staging_folder(out_dir) as staging:
        source = open_source(source_name, DOWNLOADS, lambda: staging / "spooled.tmp")
        tokenizer, totals = _tokenizer_for(source, options)
        dtype = token_dtype(tokenizer.vocab_size)
        tokens = _encode_to_file(source, options, tokenizer, dtype, staging / "train.bin")
        val_tokens = _split(staging, tokens, options.val_fraction, np.dtype(dtype).itemsize)
        (staging / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        metadata = Metadata(
            source=source.description,
            source_sha256=source.sha256(),
            documents=len(source.documents),
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
            train_tokens=tokens - val_tokens,
            val_tokens=val_tokens,
            train_sha256=_file_sha256(staging / "train.bin"),
            val_sha256=_file_sha256(staging / "val.bin"),
        )
        (staging / "meta.json").write_text(metadata.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (staging / "spooled.tmp").unlink(missing_ok=True)
        _put_in_place(staging, out_dir)
    return metadata


def prepare_if_needed(source_name: str, options: PreparationFields) -> Path:
    """The folder with exactly this text prepared in exactly this way: an earlier one, or a new one.

    Raises:
        UserError: as `prepare`.
    """
    folder = default_folder(source_name, options)
    if is_stream(source_name) or not _is_prepared_from(folder, source_name, options):
        prepare(source_name, options, folder)
    return folder


def _is_prepared_from(folder: Path, source_name: str, options: PreparationFields) -> bool:
    if not (folder / "meta.json").is_file():
        return False
    try:
        metadata = read_metadata(folder)
    except UserError:
        return False  # an older layout: prepared again
    source = open_source(source_name, DOWNLOADS, lambda: folder)
    return metadata.source_sha256 == source.sha256()


def default_folder(source_name: str, options: PreparationFields) -> Path:
    """Where a preparation goes when nobody says: named after text and tokenizer, distinct for distinct options."""
    place = str(Path(source_name).resolve()) if Path(source_name).exists() else source_name
    identity = repr((place, options.model_dump(include=set(PreparationFields.model_fields))))
    stem = "".join(c if c.isalnum() or c in "-_." else "_" for c in Path(source_name).stem) or "text"
    digest = hashlib.sha256(identity.encode("utf-8", errors="surrogateescape")).hexdigest()[:8]
    return PREPARED / f"{stem[:40]}-{options.tokenizer}-{digest}"


def refuse_foreign_folder(out_dir: Path) -> None:
    """Never overwrite what prepare did not write."""
    if out_dir.exists() and not (out_dir / "meta.json").is_file() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UserError(f"{out_dir}: exists and is not a prepared folder; name another --out_dir")


def _check_encoding(encoding: str) -> None:
    try:
        "".encode(encoding)
    except LookupError:
        raise UserError(
            f"encoding = {encoding!r}: expected a text encoding that Python knows, such as utf-8, utf-16 or latin-1"
        ) from None


@contextmanager
def _staging_folder(out_dir: Path) -> Iterator[Path]:
    """A folder beside the final one, gone when the block ends in whatever way."""
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    except OSError as error:
        raise UserError(f"{out_dir}: cannot be made ({error.strerror}); name another --out_dir") from None
    try:
        yield staging
    except OSError as error:
        raise UserError(f"{out_dir}: cannot be written ({error.strerror}); nothing was kept") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _put_in_place(staging: Path, out_dir: Path) -> None:
    staging.chmod(0o755)
    old = out_dir.with_name(f".{out_dir.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out_dir.exists():
        out_dir.rename(old)
    staging.rename(out_dir)
    shutil.rmtree(old, ignore_errors=True)


def _pieces(source: Source, options: PreparationFields, tokenizer: Tokenizer, progress: str) -> Iterator[list[str]]:
    """Each document as pieces that can be encoded on their own, a list of pieces a document or part of one.

    An empty list marks the end of a document.
    """
    with tqdm(total=source.size(), desc=progress, unit="B", unit_scale=True, leave=False) as bar:
        for document in source.documents:
            waiting, pieces = "", []
            for text in read_text(document, options.encoding, bar.update):
                waiting += text
                cut = tokenizer.safe_prefix(waiting)
                pieces.append(waiting[:cut])
                waiting = waiting[cut:]
                if len(waiting) > PIECE_LIMIT:
                    raise UserError(
                        f"{document.path}: more than {PIECE_LIMIT:,} characters without a space or a line break; "
                        f"the {tokenizer.name} tokenizer cannot cut them; use --tokenizer=char or byte"
                    )
                if len(pieces) == PIECES_AT_ONCE:
                    yield pieces
                    pieces = []
            yield [*pieces, waiting]
            yield []


def _tokenizer_for(source: Source, options: PreparationFields) -> tuple[Tokenizer, Totals]:
    """First pass: count the text, and learn the vocabulary from it where it is learned."""
    totals = Totals()
    cutter = BPETokenizer("bpe", "", [], end_of_text=0, vocab_size=1) if options.tokenizer == "bpe" else ByteTokenizer()

    def counted() -> Iterator[str]:
        for pieces in _pieces(source, options, cutter, "reading"):
            for piece in pieces:
                totals.characters += len(piece)
                totals.bytes += len(piece.encode("utf-8"))
                yield piece

    tokenizer: Tokenizer
    if options.tokenizer == "char":
        characters: set[str] = set()
        for piece in counted():
            characters.update(piece)
        tokenizer = CharTokenizer(characters)
    elif options.tokenizer == "bpe":
        tokenizer = train_bpe(counted(), options.vocab_size)
    else:
        tokenizer = ByteTokenizer() if options.tokenizer == "byte" else named_encoding(options.tokenizer)
        for _ in counted():
            pass
    return tokenizer, totals


def _encode_to_file(source: Source, options: PreparationFields, tokenizer: Tokenizer, dtype: str, path: Path) -> int:
    """Second pass: every document's ids and one end-of-text id, in order. Returns how many."""
    end_of_text = np.array([tokenizer.end_of_text], dtype=np.uint32)
    count = 0
    with path.open("wb") as file:
        for pieces in _pieces(source, options, tokenizer, "encoding"):
            encoded = tokenizer.encode_batch(pieces, parse_special=options.parse_special) if pieces else [end_of_text]
            for ids in encoded:
                file.write(to_stored(ids, dtype).tobytes())
                count += len(ids)
    return count


def _split(folder: Path, tokens: int, val_fraction: float, itemsize: int) -> int:
    """Move the last part of train.bin to val.bin; return its number of tokens.

    Raises:
        UserError: a part that is wanted would have no token to predict.
    """
    val_tokens = round(tokens * val_fraction)
    if val_fraction > 0 and val_tokens < 2:
        raise UserError(
            f"val_fraction = {val_fraction}: of {tokens} tokens that leaves {val_tokens} for validation, and 2 are "
            f"needed; use at least {2 / tokens:.2g}, or 0 to train without validation"
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
