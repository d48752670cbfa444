"""Text to token ids and back: characters, bytes, a BPE trained on the text, or a named tiktoken encoding.

A tokenizer is data: it saves to and loads from JSON alone, so that a checkpoint can carry it. Each one has
exactly one end-of-text id, which stands between documents and is never produced by plain text.
"""

import base64
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from config.errors import UserError, reason_of
from data.patterns import BPE_PATTERN, last_safe_cut, quick_form

if TYPE_CHECKING:  # the character path works where tiktoken cannot be imported
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
TokenIds = npt.NDArray[np.uint32]
CORES = os.cpu_count() or 1


def length_of_begun(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of a text with which one of the markers begins, perhaps to go on later."""
    for start in range(max(0, len(text) - max(map(len, markers), default=0)), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return len(text) - start
    return 0


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        name: what it is called in settings and messages.
        token_bytes: the UTF-8 bytes of each id, by id; ids that no text has are empty.
        end_of_text: the id between documents.
    """

    name: str
    token_bytes: list[bytes]
    end_of_text: int

    @property
    def vocab_size(self) -> int:
        """Number of ids, end-of-text included."""
        return len(self.token_bytes)

    @abstractmethod
    def encode_plain(self, texts: list[str]) -> list[TokenIds]:
        """Ids of each text, in which nothing is special.

        Raises:
            UserError: a text cannot be encoded.
        """

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """What JSON must hold to make this tokenizer again."""

    def safe_prefix(self, text: str, *, parse_special: bool = False) -> int:
        """How many leading characters can be encoded on their own without changing the ids of the whole."""
        return len(text) - (length_of_begun(text, [END_OF_TEXT]) if parse_special else 0)

    def encode_batch(self, texts: list[str], *, parse_special: bool = False) -> list[TokenIds]:
        """Ids of each text; `parse_special` reads END_OF_TEXT as the end-of-text id, else it is plain text.

        Raises:
            UserError: a text cannot be encoded.
        """
        if not parse_special:
            return self.encode_plain(texts)
        separator = np.array([self.end_of_text], dtype=np.uint32)
        encoded = []
        for text in texts:
            parts = self.encode_plain(text.split(END_OF_TEXT))
            encoded.append(np.concatenate([piece for part in parts for piece in (separator, part)][1:]))
        return encoded

    def encode(self, text: str, *, parse_special: bool = False) -> TokenIds:
        """`encode_batch` of one text."""
        return self.encode_batch([text], parse_special=parse_special)[0]

    def decode(self, ids: Iterable[int], *, show_special: bool = False) -> str:
        """Text of some ids; end-of-text gives nothing unless shown, bytes that are not UTF-8 give U+FFFD."""
        shown = (i for i in map(int, ids) if show_special or i != self.end_of_text)
        return b"".join(self.token_bytes[i] for i in shown).decode("utf-8", errors="replace")

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes of text that each id stands for, by id; none for end-of-text."""
        lengths = np.array([len(token) for token in self.token_bytes], dtype=np.int64)
        lengths[self.end_of_text] = 0
        return lengths

    def to_json(self) -> str:
        """The whole tokenizer as JSON."""
        return json.dumps({"name": self.name, **self._content()}, ensure_ascii=False)

    def sha256(self) -> str:
        """Identity: equal for tokenizers that do the same."""
        return hashlib.sha256(self.to_json().encode("utf-8")).hexdigest()


class CharTokenizer(Tokenizer):
    """One id for each character that the text has, in code-point order."""

    name = "char"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))
        self.token_bytes = [character.encode("utf-8") for character in self.characters] + [END_OF_TEXT.encode()]
        self.end_of_text = len(self.characters)

    @cached_property
    def _id_of(self) -> TokenIds:
        """Id by code point; vocab_size where the vocabulary lacks the character."""
        table = np.full(0x110000, self.vocab_size, dtype=np.uint32)
        table[[ord(character) for character in self.characters]] = np.arange(len(self.characters))
        return table

    def encode_plain(self, texts: list[str]) -> list[TokenIds]:
        encoded = []
        for text in texts:
            ids = self._id_of[np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")]
            unknown = np.flatnonzero(ids == self.vocab_size)
            if len(unknown):
                missing = sorted({text[i] for i in unknown.tolist()})
                shown = " ".join(repr(character) for character in missing[:5]) + (" ..." if missing[5:] else "")
                raise UserError(
                    f"the char vocabulary has no {shown}: it holds the {len(self.characters)} characters of its "
                    f"training text; use those, or train with --tokenizer=byte or bpe, which hold every character"
                )
            encoded.append(ids)
        return encoded

    def _content(self) -> dict[str, Any]:
        return {"characters": "".join(self.characters)}


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8."""

    name = "byte"

    def __init__(self) -> None:
        self.token_bytes = [bytes([value]) for value in range(256)] + [END_OF_TEXT.encode()]
        self.end_of_text = 256

    def encode_plain(self, texts: list[str]) -> list[TokenIds]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32) for text in texts]

    def _content(self) -> dict[str, Any]:
        return {}


class BPETokenizer(Tokenizer):
    """Byte-pair encoding (Sennrich et al. 2016; over bytes as in GPT-2), encoded by tiktoken.

    Args:
        name: "bpe", or that of a tiktoken encoding.
        pattern: the regular expression that cuts text before merging.
        ranks: the bytes of each mergeable token, by its id; empty at ids that no text has.
        end_of_text: the id between documents, one of those.

    Raises:
        ValueError: end_of_text is the id of a text.
    """

    def __init__(self, name: str, pattern: str, ranks: list[bytes], end_of_text: int) -> None:
        if not 0 <= end_of_text < len(ranks) or ranks[end_of_text]:
            raise ValueError(f"end_of_text = {end_of_text} is not an id without text among {len(ranks)} ids")
        self.name, self.pattern, self.ranks, self.end_of_text = name, pattern, ranks, end_of_text
        self.token_bytes = [*ranks[:end_of_text], END_OF_TEXT.encode(), *ranks[end_of_text + 1 :]]

    @cached_property
    def _encoding(self) -> "tiktoken.Encoding":
        import tiktoken

        ranks = {token: rank for rank, token in enumerate(self.ranks) if token}

        def encoding(pattern: str) -> "tiktoken.Encoding":
            special_tokens = {END_OF_TEXT: self.end_of_text}
            return tiktoken.Encoding(self.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens)

        try:
            return encoding(quick_form(self.pattern))
        except ValueError:  # alternatives that are within the engine's limit may be beyond it together
            return encoding(self.pattern)

    def encode_plain(self, texts: list[str]) -> list[TokenIds]:
        try:
            self._encoding  # noqa: B018  # made here, so that what is wrong with it is said once
        except Exception as error:  # the pattern is one that the regex engine refuses
            raise UserError(f"the {self.name} tokenizer does not serve: {reason_of(error)}") from None
        try:
            with ThreadPoolExecutor(CORES) as threads:  # tiktoken lets go of Python's lock while it encodes
                return list(threads.map(self._encode_one, texts))
        except BaseException as error:  # tiktoken's Rust panics are no Exceptions
            if type(error).__name__ != "PanicException":
                raise
            raise UserError(
                f"the {self.name} tokenizer cannot encode this text, probably a run of very many characters without "
                f"a break; use --tokenizer=char or byte"
            ) from None

    def _encode_one(self, text: str) -> TokenIds:
        ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        if int(self._lengths[ids].sum()) != len(text.encode("utf-8")):  # tiktoken passes over what no pattern matches
            raise UserError(f"the {self.name} tokenizer does not serve: its pattern leaves out parts of the text")
        return ids

    @cached_property
    def _lengths(self) -> npt.NDArray[np.int64]:
        return self.byte_lengths()

    def safe_prefix(self, text: str, *, parse_special: bool = False) -> int:
        # The end-of-text marker holds no blank and no line break, so no cut falls into it.
        return last_safe_cut(text, self.pattern)

    def _content(self) -> dict[str, Any]:
        return {
            "pattern": self.pattern,
            "end_of_text": self.end_of_text,
            "ranks": [base64.b64encode(token).decode("ascii") for token in self.ranks],
        }


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Learn merges from text, in pieces that `last_safe_cut` allows.

    Args:
        texts: the pieces.
        vocab_size: ids wanted, end-of-text included; fewer when the text has no more pairs to merge.

    Raises:
        ValueError: vocab_size is under 257, the bytes and end-of-text.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size = {vocab_size}: expected 257 or more")
    import rustbpe

    trainer, pattern = rustbpe.Tokenizer(), quick_form(BPE_PATTERN)
    trainer.train_from_iterator(iter(texts), vocab_size=vocab_size - 1, buffer_size=CORES, pattern=pattern)
    by_rank = sorted((rank, bytes(token)) for token, rank in trainer.get_mergeable_ranks())
    ranks = [token for _, token in by_rank]
    return BPETokenizer("bpe", BPE_PATTERN, [*ranks, b""], end_of_text=len(ranks))


def named_encoding(name: str) -> BPETokenizer:
    """A tiktoken encoding such as gpt2, from tiktoken's cache or the network.

    Raises:
        UserError: there is no encoding of that name, or its files are neither cached nor to be downloaded.
    """
    import tiktoken

    known = tiktoken.list_encoding_names()
    if name not in known:
        raise UserError(f"tokenizer = {name!r}: expected char, byte, bpe, or a tiktoken encoding: {', '.join(known)}")
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception:
        raise UserError(
            f"tokenizer {name}: its vocabulary is neither in tiktoken's cache nor to be downloaded now; set "
            f"TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer=bpe, byte or char, which need no network"
        ) from None
    ranks = [b""] * encoding.n_vocab  # some encodings leave ids out
    for token, rank in encoding._mergeable_ranks.items():
        ranks[rank] = token
    return BPETokenizer(name, encoding._pat_str, ranks, encoding.eot_token)


def tokenizer_from_json(text: str) -> Tokenizer:
    """The tokenizer that `Tokenizer.to_json` wrote.

    Raises:
        ValueError: the text is not one.
    """
    try:
        content = json.loads(text)
        if content["name"] == "char":
            if not isinstance(content["characters"], str):
                raise ValueError("its characters are no text")
            return CharTokenizer(content["characters"])
        if content["name"] == "byte":
            return ByteTokenizer()
        ranks = [base64.b64decode(token, validate=True) for token in content["ranks"]]
        learned = [token for token in ranks if token]
        if len(set(learned)) < len(learned) or not {bytes([value]) for value in range(256)} <= set(learned):
            raise ValueError("its ranks repeat a token, or lack one of the 256 bytes")
        name, pattern = str(content["name"]), str(content["pattern"])
        (name + pattern).encode("utf-8")  # half characters, as JSON may hold them, are an error here
        return BPETokenizer(name, pattern, ranks, int(content["end_of_text"]))
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a tokenizer: {error!r}") from None
