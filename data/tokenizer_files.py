"""Tokenizers of other tools: Hugging Face's tokenizer.json, GPT-2's vocab.json with merges.txt, and tiktoken's files.

A byte-level BPE is read exactly or refused: what its file says must be what our encoder does.
"""

import base64
import json
import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from config.errors import UserError, reason_of
from data.patterns import BPE_PATTERN, GPT2_PATTERN
from data.tokenizers import (
    END_OF_TEXT,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    tokenizer_from_json,
)

ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")  # what the end of a text is called, best first


def tokenizer_from_file(path: Path) -> Tokenizer:
    """The tokenizer in a file: this repository's tokenizer.json, Hugging Face's, or tiktoken's ranks.

    tiktoken's files (lines of a token in Base64 and its rank) say nothing of the pattern; GPT-2's is taken.

    Raises:
        UserError: the file cannot be read, or what it says cannot be done exactly.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if not text.lstrip().startswith("{"):
            return _from_tiktoken(text)
        content = json.loads(text)
        return from_huggingface(content) if "model" in content else tokenizer_from_json(text)
    except OSError as error:
        raise UserError(f"tokenizer = {path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"tokenizer = {path}: {reason_of(error)}; expected a tokenizer.json with a byte-level BPE, or a file of "
            f"tiktoken's ranks"
        ) from None


def _from_tiktoken(text: str) -> BPETokenizer:
    ranks = {}
    for number, line in enumerate(text.splitlines(), start=1):
        token, _, rank = line.partition(" ")
        if line and not rank.isdecimal():
            raise ValueError(f"line {number} is not a token in Base64 and its rank")
        if line:
            ranks[int(rank)] = base64.b64decode(token, validate=True)
    if not ranks or max(ranks) > 2 * len(ranks):
        raise ValueError("holds no ranks, or such that leave most ids out")
    table = [ranks.get(rank, b"") for rank in range(max(ranks) + 1)]
    return _checked(BPETokenizer("bpe", GPT2_PATTERN, [*table, b""], len(table)))


def _checked(tokenizer: BPETokenizer) -> BPETokenizer:
    """As `tokenizer_from_json` takes it back, which a run does."""
    return tokenizer_from_json(tokenizer.to_json())  # type: ignore[return-value]


# --- Hugging Face -----------------------------------------------------------------------------------


@cache
def byte_letters() -> dict[int, str]:
    """The letter for each byte in GPT-2's vocab.json: itself where it can be seen, else one from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def letters_of(token: bytes) -> str:
    """A token as it stands in vocab.json."""
    return "".join(byte_letters()[byte] for byte in token)


def bytes_of(letters: str) -> bytes:
    """The token that stands in vocab.json as these letters.

    Raises:
        ValueError: a letter stands for no byte.
    """
    values = {letter: byte for byte, letter in byte_letters().items()}
    try:
        return bytes(values[letter] for letter in letters)
    except KeyError as error:
        raise ValueError(f"the token {letters!r} is not of byte letters ({error})") from None


def merges_of(ranks: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The pair that is merged into each token of more than one byte, in the order of the ranks.

    Found by encoding the token with the ranks below its own (Sennrich et al. 2016).

    Raises:
        ValueError: a token is not made of two earlier ones.
    """
    rank_of = {token: rank for rank, token in enumerate(ranks) if token}
    merges = []
    for token in (token for token in ranks if len(token) > 1):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [rank_of.get(a + b, len(ranks)) for a, b in pairwise(parts)]
            best = min(pairs)
            if best >= rank_of[token]:
                break
            place = pairs.index(best)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) != 2:
            raise ValueError(f"the token {token!r} is not made of two earlier ones")
        merges.append((parts[0], parts[1]))
    return merges


def from_vocab_and_merges(
    name: str, pattern: str, vocab: dict[str, int], merges: Sequence[str | list[str]], specials: dict[str, int]
) -> BPETokenizer:
    """A byte-level BPE from its vocabulary and its merges, in order.

    Args:
        name: what it is called.
        pattern: that cuts text before merging.
        vocab: id by the letters of each token.
        merges: pairs of letters, as "a b" or ["a", "b"].
        specials: id by content of the tokens that no plain text has; one of them is the end of text.

    Raises:
        ValueError: encoding by these ids as ranks would merge otherwise than the merges say.
    """
    end = next((content for content in ENDS if content in specials), None)
    end = end or (next(iter(specials)) if len(specials) == 1 else None)
    if end is None:
        raise ValueError(f"which special token ends a text? expected one of {', '.join(ENDS)}")
    size = 1 + max([*vocab.values(), *specials.values()])
    if size > 2 * (len(vocab) + len(specials)):
        raise ValueError("its ids leave most numbers out")
    ranks = [b""] * size
    for letters, token_id in vocab.items():
        if letters not in specials:
            ranks[token_id] = bytes_of(letters)
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    said = [(bytes_of(left), bytes_of(right)) for left, right in pairs]
    if merges_of(ranks) != said:
        raise ValueError("its merges are not in the order of the ids that they make, so it cannot be encoded exactly")
    return _checked(BPETokenizer(name, pattern, ranks, specials[end]))


def from_huggingface(content: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a tokenizer.json, which must be a byte-level BPE, or one that `to_huggingface` wrote.

    Raises:
        ValueError: it is of another kind, or changes text.
    """
    try:
        model, added = content["model"], content.get("added_tokens") or []
        specials = {token["content"]: int(token["id"]) for token in added}
        plain = [token["content"] for token in added if not token.get("special")]
        if plain:
            raise ValueError(f"its added token {plain[0]!r} is found in plain text before anything is merged")
        if model.get("type") == "WordLevel":
            return _char_from_huggingface(model["vocab"], specials)
        if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
            raise ValueError(f"its model is {model.get('type')}, not a byte-level BPE")
        if content.get("normalizer") is not None:
            raise ValueError("its normalizer changes the text before encoding, so that it would not round-trip")
        pattern = _pattern_of(content.get("pre_tokenizer"))
        if pattern is None and not model["merges"]:
            return _byte_from_huggingface(model["vocab"], specials)
        if pattern is None:
            raise ValueError("its pre-tokenizer does not cut text, which makes encoding a long text take for ever")
        return from_vocab_and_merges("bpe", pattern, model["vocab"], model["merges"], specials)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a tokenizer.json of Hugging Face's: {error!r}") from None


def _pattern_of(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The pattern that text is cut by; None where it is not cut."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise ValueError("its pre-tokenizer is not ByteLevel without a prefix space")
    if len(steps) == 1:
        return GPT2_PATTERN if last.get("use_regex", True) else None
    split = steps[0]
    if len(steps) > 2 or split.get("type") != "Split" or split.get("behavior") != "Isolated" or split.get("invert"):
        raise ValueError("its pre-tokenizer is not a Split that isolates, then ByteLevel")
    if last.get("use_regex", True):
        raise ValueError("its pre-tokenizer cuts twice")
    pattern = str(split["pattern"]["Regex"])
    if greedy(pattern) != pattern:
        raise ValueError("its pattern has a {...}+, which our regex engine reads otherwise")
    return BPE_PATTERN if pattern == greedy(BPE_PATTERN) else pattern


def _byte_from_huggingface(vocab: dict[str, int], specials: dict[str, int]) -> ByteTokenizer:
    tokenizer = ByteTokenizer()
    if vocab != {letters_of(bytes([byte])): byte for byte in range(256)} or specials != {END_OF_TEXT: 256}:
        raise ValueError("its ids are not those of the bytes themselves, then end-of-text")
    return tokenizer


def _char_from_huggingface(vocab: dict[str, int], specials: dict[str, int]) -> CharTokenizer:
    characters = [character for character in sorted(vocab, key=lambda c: vocab[c]) if character not in specials]
    tokenizer = CharTokenizer(characters)
    if tokenizer.characters != characters or specials != {END_OF_TEXT: tokenizer.end_of_text}:
        raise ValueError("its words are not single characters in code-point order, then end-of-text")
    return tokenizer


def to_huggingface(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer as a tokenizer.json, with the same ids for the same text.

    Raises:
        ValueError: its tokens are not all made by merging.
    """
    end = {"id": tokenizer.end_of_text, "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False, "special": True}  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    decoder: dict[str, Any] = byte_level
    if isinstance(tokenizer, CharTokenizer):
        vocab = {character: i for i, character in enumerate(tokenizer.characters)}
        model: dict[str, Any] = {"type": "WordLevel", "vocab": vocab | {END_OF_TEXT: tokenizer.end_of_text},
                                 "unk_token": END_OF_TEXT}  # fmt: skip
        cut: dict[str, Any] = _split_at(r"[\s\S]")
        decoder = {"type": "Fuse"}
    else:
        pattern = tokenizer.pattern if isinstance(tokenizer, BPETokenizer) else None
        ranks = [b"" if i == tokenizer.end_of_text else token for i, token in enumerate(tokenizer.token_bytes)]
        vocab = {letters_of(token): i for i, token in enumerate(ranks) if token}
        merges = [f"{letters_of(a)} {letters_of(b)}" for a, b in merges_of(ranks)]
        model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                 "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                 "vocab": vocab, "merges": merges}  # fmt: skip
        cut = (
            byte_level
            if pattern is None
            else {"type": "Sequence", "pretokenizers": [_split_at(greedy(pattern)), byte_level]}
        )
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
            "pre_tokenizer": cut, "post_processor": None, "decoder": decoder, "model": model}  # fmt: skip


def greedy(pattern: str) -> str:
    """A pattern for their regex engine, in which {1,3}+ repeats where in ours it only does not give back."""
    return re.sub(r"(\{\d+,\d*\})\+", r"\1", pattern)


def _split_at(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
