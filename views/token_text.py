"""How tokens are shown: whole characters, although a token may hold only some of a character's bytes.

A character (in Unicode's sense of a grapheme cluster: a Hangul syllable of several letters, an emoji joined of several)
is shown in the token in which it begins; the tokens that it goes on in say which part of it they are.
"""

import unicodedata
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import regex

from data.tokenizers import Tokenizer

VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
NOTHING = "∅"  # the label of a token without bytes
KEPT_FORMAT = {"\u200c", "\u200d"}  # joiners, which belong to the characters around them


class TokenText(NamedTuple):
    """One token as it is shown.

    Attributes:
        text: the characters that begin in it.
        part: which part of a character it goes on with, as "2/3"; "" for none.
        label: both, with blanks and line breaks made visible.
    """

    text: str
    part: str
    label: str


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> list[TokenText]:
    """Each token of a text as it is shown in its place."""
    pieces = [tokenizer.token_bytes[token] for token in ids]
    # A byte that is no part of a character becomes one of its own.
    text = b"".join(pieces).decode("utf-8", errors="surrogateescape")
    characters: list[tuple[int, str]] = []  # the byte where each begins
    end = 0
    for character in regex.findall(r"\X", text):
        characters.append((end, character))
        end += len(character.encode("utf-8", errors="surrogateescape"))
    ends = [start for start, _ in characters[1:]] + [end]
    starts = list(accumulate(map(len, pieces), initial=0))  # of the tokens, and the end
    shown, first = [], 0  # `first` is the first character that does not end before the token
    for start, stop in pairwise(starts):
        while first < len(characters) and ends[first] <= start:
            first += 1
        own, continued = "", ""
        for (begins, character), ending in zip(characters[first:], ends[first:], strict=True):
            if begins >= stop:
                break
            if begins >= start:
                own += _displayed(character)
            else:
                sharing = [a for a, b in pairwise(starts) if a < ending and b > begins]
                part = f"{sharing.index(start) + 1}/{len(sharing)}"
                continued = f"{_displayed(character)} {part}"
        label = "".join(VISIBLE.get(character, character) for character in own)
        shown.append(TokenText(own, part if continued else "", (continued + label) or NOTHING))
    return shown


def _displayed(text: str) -> str:
    """With replacement characters for bytes that are none, and pictures for characters that would do something."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    category, code = unicodedata.category(character), ord(character)
    if category == "Cs":
        return "\ufffd"
    if category == "Cc" and character not in VISIBLE:
        return chr(0x2400 + code) if code < 32 else "\u2421" if code == 127 else "\ufffd"
    if category == "Cf" and character not in KEPT_FORMAT and not 0xE0020 <= code <= 0xE007F:  # those make flags
        return f"‹{code:04X}›"
    return character
