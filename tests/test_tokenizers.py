"""Tokenizers: exact round trips in every language, special text, offline behaviour, saving."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from config.errors import UserError
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
     '{"name": "bpe", "pattern": "a", "ranks": ["%"], "end_of_text": 1, "vocab_size": 2}',
     '{"name": "bpe", "pattern": "a", "ranks": ["YQ=="], "end_of_text": 0, "vocab_size": 2}',
     '{"name": "bpe", "pattern": "a", "ranks": ["YQ=="], "end_of_text": 1, "vocab_size": 999999999999}'],
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


@pytest.mark.parametrize("encoding", ["gpt2", "cl100k_base", "o200k_base"])
def test_D09_the_places_to_cut_are_borders_of_every_tiktoken_pattern(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patterns themselves ship with tiktoken; their vocabularies do not, so bytes stand in."""
    import tiktoken_ext.openai_public as public

    ranks = {bytes([value]): value for value in range(256)}
    for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(public, name, lambda *a, **k: ranks)
    import regex

    pattern = regex.compile(public.ENCODING_CONSTRUCTORS[encoding]()["pat_str"])
    generator = np.random.default_rng(0)
    alphabet = [
        "a",
        "Bc",
        "é",
        "한",
        "42",
        " ",
        "   ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        ".",
        "/",
        "'s",
        "'LL",
        "_",
        "\u0301",
        "\u3000",
    ]
    tokenizer = BPETokenizer("x", "", [b"x"], end_of_text=1, vocab_size=2)
    cuts = 0
    for _ in range(3000):
        text = "".join(generator.choice(alphabet, size=generator.integers(1, 14)))
        cut = tokenizer.safe_prefix(text)
        cuts += 0 < cut < len(text)
        assert pattern.findall(text) == pattern.findall(text[:cut]) + pattern.findall(text[cut:]), repr(text)
    assert cuts > 1000


@pytest.mark.parametrize("run", ["^" * 10**6, " " * 10**6 + "a", "\n" * 10**6 + "b", "a" * 10**6, "1" * 10**6])
def test_D10_a_very_long_run_is_learned_from_and_encoded(run: str) -> None:
    tokenizer = train_bpe([run], 300)
    assert tokenizer.decode(tokenizer.encode(run)) == run


def test_D10_a_panic_of_the_encoder_becomes_a_clean_error() -> None:
    class PanicException(BaseException):
        """As pyo3 raises it: no Exception."""

    class Panicking:
        def encode_ordinary_batch(self, texts: list[str]) -> list[list[int]]:
            raise PanicException("StackOverflow")

    tokenizer = BPETokenizer("gpt2", "", [b"x"], end_of_text=1, vocab_size=2)
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
