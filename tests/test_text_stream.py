"""Streamed text: whole characters only, nothing of a stop string, and the same text as at once."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizers import END_OF_TEXT, ByteTokenizer, CharTokenizer, Tokenizer
from engine.text_stream import stream_text

BYTES = ByteTokenizer()
TEXTS = ("안녕하세요, 세계!", "👩‍👩‍👧‍👦 family", "plain\n\ntext", "Ω≈ç√")


def pieces(
    text: str, stop: tuple[str, ...] = (), tokenizer: Tokenizer = BYTES, tail: tuple[int, ...] = (), **options: bool
) -> list[str]:
    return list(stream_text([*tokenizer.encode(text).tolist(), *tail], tokenizer, stop=stop, **options))


@pytest.mark.parametrize("text", TEXTS)
def test_S09_no_piece_holds_half_a_character_and_the_whole_is_the_text(text: str) -> None:
    streamed = pieces(text)
    assert "".join(streamed) == text and "\ufffd" not in "".join(streamed)
    assert len(streamed) == len(text), "every character comes as soon as its last byte does"


def test_S09_bytes_left_over_come_once_at_the_end() -> None:
    cut = "세계".encode()[:5]
    assert list(stream_text(list(cut), BYTES)) == ["세", "\ufffd"]
    assert "".join(stream_text([0xFF, 0x41, 0xC3], BYTES)) == BYTES.decode([0xFF, 0x41, 0xC3])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_S09_streaming_any_bytes_gives_what_decoding_them_at_once_gives(values: list[int]) -> None:
    assert "".join(stream_text(values, BYTES)) == BYTES.decode(values)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one\n\ntwo", ("\n\n",), "one"),
        ("one\ntwo", ("\n\n",), "one\ntwo"),
        ("one\n", ("\n\n",), "one\n"),
        ("\n\nleading", ("\n\n",), ""),
        ("aab", ("ab",), "a"),
        ("aaab!", ("aab",), "a"),
        ("abcabd.", ("abd",), "abc"),
        ("say STOP or END", ("END", "STOP"), "say "),
        ("안녕 끝 세계", ("끝",), "안녕 "),
        ("prefix then prefer", ("preferred",), "prefix then prefer"),
    ],
)
def test_S08_text_ends_right_before_a_stop_string_whose_tokens_it_spans(
    text: str, stop: tuple[str, ...], expected: str
) -> None:
    for tokenizer in (BYTES, CharTokenizer(text)):
        assert "".join(pieces(text, stop, tokenizer)) == expected


@settings(deadline=None, max_examples=300)
@given(st.text("ab\né", max_size=30), st.lists(st.text("ab\né", min_size=1, max_size=4), max_size=3))
def test_S08_stopping_is_cutting_at_the_first_stop_string(text: str, stop: list[str]) -> None:
    """The first to be complete: reading left to right, where the earliest one ends."""
    expected = text
    for end in range(len(text) + 1):
        found = [text[:end].find(marker) for marker in stop if marker in text[:end]]
        if found:
            expected = text[: min(found)]
            break
    assert "".join(pieces(text, tuple(stop))) == expected


def test_S08_no_more_tokens_are_made_after_the_end() -> None:
    made = []

    def tokens() -> Iterator[int]:
        for value in b"abc\n\nxyz":
            made.append(value)
            yield value

    assert "".join(stream_text(tokens(), BYTES, stop=["\n\n"])) == "abc"
    assert bytes(made) == b"abc\n\n"


def test_S08_end_of_text_ends_a_sample_and_is_printed_only_when_asked() -> None:
    after = (BYTES.end_of_text, *b"never")
    assert "".join(pieces("text", tail=after)) == "text"
    assert "".join(pieces("text", tail=after, show_special=True)) == f"text{END_OF_TEXT}"
    assert "".join(pieces("tex", ("\n\n",), tail=(10, BYTES.end_of_text))) == "tex\n", "what was held back comes out"
