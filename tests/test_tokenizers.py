"""Tokenizers: exact round trips in every language, special text, offline behaviour, saving."""

import base64
import json
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from config.errors import UserError
from data.patterns import BPE_PATTERN
from data.tokenizers import (
    END_OF_TEXT,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    named_encoding,
    tokenizer_from_json,
    train_bpe,
)
from tests.conftest import REPOSITORY

SAMPLES = {
    "english": "The quick brown fox, 1234567 times;\n\n  it's \t done.\r\n",
    "korean composed": "안녕하세요, 세계! 한국어 텍스트입니다.",
    "korean decomposed": "\u1112\u1161\u11ab\u1100\u1173\u11af",
    "emoji with joiners": "👩‍👩‍👧‍👦 and 👍🏽",
    "right to left": "שלום עולם مرحبا",
    "accents": "Ça déjà vu, naïve façade: Ω≈ç√",
    "lone carriage returns": "a\rb\r\rc",
    "controls": "\x00\x01\x7f\ufeff\u200b",
    "marker": f"one {END_OF_TEXT} two",
    "empty": "",
}
EVERYTHING = "".join(SAMPLES.values())
BPE = train_bpe([EVERYTHING * 3, "def f(x):\n        return x\n" * 20], 400)
MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "char": lambda: CharTokenizer(EVERYTHING),
    "byte": ByteTokenizer,
    "bpe": lambda: BPE,
}
every_tokenizer = pytest.mark.parametrize("kind", list(MAKERS))


@every_tokenizer
@pytest.mark.parametrize("name", list(SAMPLES))
def test_D14_every_text_round_trips_exactly(kind: str, name: str) -> None:
    tokenizer = MAKERS[kind]()
    ids = tokenizer.encode(SAMPLES[name])
    assert ids.dtype == np.uint32
    assert tokenizer.decode(ids) == SAMPLES[name]
    assert tokenizer.end_of_text not in ids
    assert all(i < tokenizer.vocab_size for i in ids)


@settings(deadline=None, max_examples=100)
@given(st.text())
@example("\ud7ff\ue000\U0010ffff")
def test_D14_any_text_round_trips_through_bytes_and_bpe(text: str) -> None:
    for tokenizer in (ByteTokenizer(), BPE, CharTokenizer(text)):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_D02_half_a_surrogate_pair_is_never_another_character() -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        with pytest.raises(UnicodeEncodeError):
            tokenizer.encode("a\ud800")


@every_tokenizer
def test_D06_the_end_of_text_marker_is_plain_text_unless_asked_for(kind: str) -> None:
    tokenizer, text = MAKERS[kind](), f"one {END_OF_TEXT} two"
    plain = tokenizer.encode(text)
    assert tokenizer.end_of_text not in plain and tokenizer.decode(plain) == text
    parsed = tokenizer.encode(text, parse_special=True)
    assert parsed.tolist().count(tokenizer.end_of_text) == 1
    assert tokenizer.decode(parsed) == "one  two"
    assert tokenizer.decode(parsed, show_special=True) == text


def test_D06_gpt2_never_gives_id_50256_for_text(gpt2_cache: None) -> None:
    tokenizer = named_encoding("gpt2")
    text = f"{END_OF_TEXT}one {END_OF_TEXT} two{END_OF_TEXT}"
    assert 50256 not in tokenizer.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.encode(text, parse_special=True) == 50256).sum() == 3
    assert tokenizer.vocab_size == 50257 and tokenizer.end_of_text == 50256


@every_tokenizer
def test_a_tokenizer_is_the_same_after_json(kind: str) -> None:
    tokenizer = MAKERS[kind]()
    restored = tokenizer_from_json(tokenizer.to_json())
    assert type(restored) is type(tokenizer) and restored.sha256() == tokenizer.sha256()
    assert np.array_equal(restored.encode(EVERYTHING), tokenizer.encode(EVERYTHING))
    assert restored.token_bytes == tokenizer.token_bytes and restored.end_of_text == tokenizer.end_of_text


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", '{"name": "char"}', '{"name": "char", "characters": 5}', '{"name": "x", "pattern": "a"}',
     '{"name": "bpe", "pattern": "a", "ranks": ["%"], "end_of_text": 0}',
     '{"name": "bpe", "pattern": "a", "ranks": ["YQ=="], "end_of_text": 0}',
     '{"name": "bpe", "pattern": "a", "ranks": ["YQ=="], "end_of_text": 1}',
     '{"name": "bpe", "pattern": "a", "ranks": [""], "end_of_text": -1}'],
)  # fmt: skip
def test_json_that_is_no_tokenizer_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        tokenizer_from_json(text)


def test_bits_per_byte_counts_the_bytes_of_text_and_none_for_end_of_text() -> None:
    for tokenizer in (CharTokenizer("é한a"), ByteTokenizer(), BPE):
        ids = tokenizer.encode("é한aa" if tokenizer.name == "char" else EVERYTHING)
        text = tokenizer.decode(ids)
        assert tokenizer.byte_lengths()[ids].sum() == len(text.encode("utf-8"))
        assert tokenizer.byte_lengths()[tokenizer.end_of_text] == 0


def test_an_unknown_character_is_named_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"no '한' '😀'.*--tokenizer=byte or bpe"):
        CharTokenizer("abc").encode("a😀한b")


def test_char_ids_follow_the_code_points() -> None:
    tokenizer = CharTokenizer("cab\n")
    assert tokenizer.encode("\nabc").tolist() == [0, 1, 2, 3] and tokenizer.end_of_text == 4


def test_bpe_gives_the_vocabulary_asked_for_or_what_the_text_has() -> None:
    text = "".join(f"word{i} " for i in range(500))
    assert train_bpe([text], 300).vocab_size == 300
    assert train_bpe([text], 257).vocab_size == 257
    assert 257 <= train_bpe(["ab"], 5000).vocab_size < 300
    with pytest.raises(ValueError, match="expected 257 or more"):
        train_bpe([text], 256)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.sampled_from(
            ["a", "Z", "é", "한", "7", " ", "  ", "\n", "\r\n", "\t", ".", "'s", "_", "-", "\u0301", END_OF_TEXT]
        ),
        max_size=60,
    )
)
def test_D09_ids_do_not_depend_on_where_the_text_is_cut(parts: list[str]) -> None:
    text = "".join(parts)
    cut = BPE.safe_prefix(text)
    pieces = np.concatenate([BPE.encode(text[:cut]), BPE.encode(text[cut:])])
    assert np.array_equal(pieces, BPE.encode(text))


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_D09_a_marker_that_has_only_begun_waits_for_its_rest(kind: str) -> None:
    tokenizer = MAKERS[kind]()
    for length in range(1, len(END_OF_TEXT)):
        begun = "text " + END_OF_TEXT[:length]
        assert tokenizer.safe_prefix(begun, parse_special=True) == 5
        assert tokenizer.safe_prefix(begun) == len(begun)
    assert tokenizer.safe_prefix("text " + END_OF_TEXT + "x", parse_special=True) == 6 + len(END_OF_TEXT)


@pytest.mark.parametrize("name", ["p50k_base", "p50k_edit"])
def test_D08_an_encoding_that_leaves_ids_out_keeps_its_ids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    ranks = {bytes([value]): value for value in range(256)} | {b"  ": 50257}  # 50256 is end-of-text, between them
    stand_in = tiktoken.Encoding(name, pat_str=BPE_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 50256})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda wanted: stand_in)
    tokenizer = named_encoding(name)
    assert tokenizer.encode("a    b").tolist() == stand_in.encode("a    b") and 50257 in tokenizer.encode("a    b")
    restored = tokenizer_from_json(tokenizer.to_json())
    assert restored.decode(restored.encode("a    b")) == "a    b" and restored.vocab_size == 50258


@pytest.mark.parametrize("run", ["^" * 10**6, " " * 10**6 + "a", "\n" * 10**6 + "b", "a" * 10**6, "1" * 10**6])
def test_D10_a_very_long_run_is_learned_from_and_encoded(run: str) -> None:
    tokenizer = train_bpe([run], 300)
    assert tokenizer.decode(tokenizer.encode(run)) == run


def test_D10_a_panic_of_the_encoder_becomes_a_clean_error() -> None:
    class PanicException(BaseException):
        """As pyo3 raises it: no Exception."""

    class Panicking:
        def encode_to_numpy(self, text: str, *, disallowed_special: tuple[str, ...]) -> np.ndarray:
            raise PanicException("StackOverflow")

    tokenizer = BPETokenizer("gpt2", "", [b"x", b""], end_of_text=1)
    tokenizer.__dict__["_encoding"] = Panicking()
    with pytest.raises(UserError, match="--tokenizer=char or byte"):
        tokenizer.encode("x")


def test_D08_without_network_and_cache_the_error_names_the_variable_and_the_ways_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tiktoken

    def offline(name: str) -> None:
        raise ConnectionError("Max retries exceeded\n" * 30)

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UserError) as caught:
        named_encoding("gpt2")
    for word in ("gpt2", "TIKTOKEN_CACHE_DIR", "--tokenizer=bpe", "char"):
        assert word in str(caught.value)
    assert "retries" not in str(caught.value)


def test_D08_an_unknown_encoding_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'gtp2': expected char, byte, bpe, or a tiktoken encoding: .*gpt2"):
        named_encoding("gtp2")


def test_D08_the_char_path_never_imports_tiktoken() -> None:
    program = (
        "import sys; sys.modules['tiktoken'] = None; sys.modules['rustbpe'] = None\n"
        "from data.tokenizers import CharTokenizer, tokenizer_from_json\n"
        "t = CharTokenizer('abc'); print(tokenizer_from_json(t.to_json()).decode(t.encode('cab')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.stdout == "cab\n", result.stderr


@pytest.mark.parametrize("damage", ["a byte is missing", "a token is there twice", "half a character in the pattern"])
def test_K08_a_bpe_that_cannot_encode_every_text_is_refused_when_it_is_loaded(damage: str) -> None:
    content = json.loads(train_bpe(["the cat sat on the mat " * 20], 260).to_json())
    assert tokenizer_from_json(json.dumps(content)).decode([104]) == "h"
    if damage == "a byte is missing":
        content["ranks"][5] = base64.b64encode(b"something else").decode()
    elif damage == "a token is there twice":
        content["ranks"][257] = content["ranks"][256]
    else:
        content["pattern"] += "\ud800"
    with pytest.raises(ValueError, match=r"repeat a token|surrogates not allowed"):
        tokenizer_from_json(json.dumps(content))


def test_K08_a_pattern_that_passes_over_parts_of_a_text_or_is_no_pattern_is_a_clean_error() -> None:
    ranks = [bytes([value]) for value in range(256)]
    for pattern, words in (("[a-z]+", "leaves out parts"), ("(", "does not serve")):
        with pytest.raises(UserError, match=words):
            BPETokenizer("bpe", pattern, [*ranks, b""], end_of_text=256).encode("abc DEF")
