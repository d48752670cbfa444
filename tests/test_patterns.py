"""Patterns that cut text before BPE: where a text may be cut in two, and forms that are matched more quickly."""

from collections.abc import Iterator

import numpy as np
import pytest
import regex
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.patterns import BPE_PATTERN, GPT2_PATTERN, last_safe_cut, quick_form
from data.tokenizers import BPETokenizer, train_bpe

PARTS_OF_TEXT = [
    "a", "Bc", "é", "한", "42", "1234567", " ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", ".", "...", "/", "'s",
    "'LL", "'", "_", "\u0301", "。",
]  # fmt: skip


@pytest.fixture(params=["ours", "Hugging Face's gpt2", "gpt2", "cl100k_base", "o200k_base"])
def pattern(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ours and those of others; tiktoken ships its patterns, but not its vocabularies, which are not needed here."""
    import tiktoken_ext.openai_public as public

    for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(public, name, lambda *a, **k: {})
    if request.param in public.ENCODING_CONSTRUCTORS:
        return str(public.ENCODING_CONSTRUCTORS[request.param]()["pat_str"])
    return {"ours": BPE_PATTERN, "Hugging Face's gpt2": GPT2_PATTERN}[request.param]


def random_texts(count: int) -> Iterator[str]:
    """Short texts in which every two kinds of characters meet."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        yield "".join(generator.choice(PARTS_OF_TEXT, size=generator.integers(1, 14)))


def test_D09_the_places_to_cut_are_borders_of_every_pattern(pattern: str) -> None:
    compiled, cuts = regex.compile(pattern), 0
    for text in random_texts(3000):
        cut = last_safe_cut(text, pattern)
        cuts += 0 < cut < len(text)
        assert compiled.findall(text) == compiled.findall(text[:cut]) + compiled.findall(text[cut:]), repr(text)
    assert cuts > 1000


def test_D09_lines_that_end_in_punctuation_can_be_cut_where_the_pattern_allows() -> None:
    text = "한국어。\n" * 3
    assert last_safe_cut(text, BPE_PATTERN) == len(text) - 1
    assert last_safe_cut(text, r"\s*[\r\n]+") == 0


def test_the_quick_form_of_every_pattern_cuts_alike(pattern: str) -> None:
    """In the engine that encodes, and in another one."""
    quick, learned = quick_form(pattern), train_bpe(["the cat's 1234 hats, \n\n  한국어 ...\r\n"] * 30, 300)
    ranks = {token: rank for rank, token in enumerate(learned.ranks) if token}
    a, b = (tiktoken.Encoding("x", pat_str=p, mergeable_ranks=ranks, special_tokens={}) for p in (pattern, quick))
    slow, fast = regex.compile(pattern), regex.compile(quick)
    for text in random_texts(2000):
        assert slow.findall(text) == fast.findall(text), repr(text)
        assert a.encode_ordinary(text) == b.encode_ordinary(text), repr(text)


def test_a_bpe_is_encoded_by_the_quick_form() -> None:
    assert train_bpe(["a"], 257)._encoding._pat_str == quick_form(BPE_PATTERN) != BPE_PATTERN


def test_alternatives_that_are_too_large_for_one_search_are_searched_one_by_one() -> None:
    pattern = r"\p{L}{1,200}|\p{N}{1,200}|[^\s\p{L}\p{N}]{1,200}|\s+(?!\S)|\s"
    ranks = [bytes([value]) for value in range(256)]
    with pytest.raises(ValueError, match="NFA"):
        tiktoken.Encoding("x", pat_str=quick_form(pattern), mergeable_ranks={b"a": 0}, special_tokens={})
    assert BPETokenizer("bpe", pattern, [*ranks, b""], end_of_text=256).encode("a 1").tolist() == [97, 32, 49]


def test_the_quick_form_searches_once_for_neighbours_that_need_no_steps() -> None:
    assert quick_form(BPE_PATTERN) == (
        r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+)|\s{1,256}(?!\S)|\s"
    )
    assert quick_form(r"a|(?=b)b|c++|d{2}+|e*+|f?+") == r"a|(?=b)b|(?:c+|d{2}|e*|f?)"
    assert quick_form(r"x++y|a|b") == r"x++y|(?:a|b)", "a possessive repetition with something behind it stays"
    assert quick_form(r"\x{61}+|\p{L}+") == r"(?:\x{61}+|\p{L}+)", "these braces are no repetition"
    assert quick_form("[](]|a") == "(?:[](]|a)", "a bracket that begins a class is one of its characters"
    assert quick_form(r"(?:a|b)++|[|]+|\||c") == r"(?:(?:a|b)+|[|]+|\||c)"


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?i)a|b++", r"(?x) a | b", r"(?x:a |b)|c", "(?#|)a|b", r"[[a]|b]|c", r"[a&&[^b]]|c++", "a|b)|c(", "a|b|(c",
        "", r"(e)\1|c", "a+?++|b", "[a]{,2}++|b", r"\b{2}++|b", "{2}+|b", "(*|b)+|c", ".{2,1}+|b", "a{2}{2}++|b",
        r"a(?!b)|b(?<=c)|c(?<!d)|(?>d)|(e)\1",
    ],
)  # fmt: skip
def test_what_is_not_understood_for_certain_stays_as_it_is(pattern: str) -> None:
    assert quick_form(pattern) == pattern


ATOMS = ["a", "b", r"\+", r"\|", r"\(", "[a+|]", "[^)b]", r"[\]a]", "[]b]", r"\p{L}", r"\s", ".", "(?:a|b)", "(b)"]
REPETITIONS = ["", "", "+", "*", "?", "++", "*+", "?+", "+?", "{1,2}", "{2}+", "{1,}+"]
ATOM = st.builds(str.__add__, st.sampled_from(ATOMS), st.sampled_from(REPETITIONS))
ALTERNATIVES = st.lists(st.one_of(ATOM, st.just("(?!b)")), max_size=3).map("".join)


@settings(deadline=None, max_examples=300)
@given(st.lists(ALTERNATIVES, min_size=1, max_size=4).map("|".join), st.text("ab+|()] ", max_size=12))
@example(r"\++|a", "+++")
@example(r"\p{L}+|b", "aab")
@example("[]b]++|a++", "]b]aa")
@example(r"\(|a", "(a")
def test_any_pattern_and_its_quick_form_match_alike(pattern: str, text: str) -> None:
    slow, fast = regex.compile(pattern), regex.compile(quick_form(pattern))
    assert [m.span() for m in slow.finditer(text)] == [m.span() for m in fast.finditer(text)]
