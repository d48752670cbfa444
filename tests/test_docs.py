"""The walk through attention is right, and the Korean pages say the same as the English ones."""

import doctest
import importlib
import re
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from tests.conftest import REPOSITORY

WALK = REPOSITORY / "docs/attention.md"
TRANSLATED = [("README.md", "README.ko.md"), ("docs/attention.md", "docs/attention.ko.md")]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d+(?:[.,]\d+)+|\d{2,}")  # a single digit may be a word


def text_of(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def fenced(text: str) -> list[tuple[str, str]]:
    """Language and content of every fenced block."""
    return FENCED.findall(text)


def sections(text: str) -> list[str]:
    """The prose of each section, the part before the first heading included."""
    return re.split(r"^#+ .*$", FENCED.sub("", text), flags=re.MULTILINE)


def examples_of(text: str) -> doctest.DocTest:
    code = "\n\n".join(content for language, content in fenced(text) if language == "python")
    return doctest.DocTestParser().get_doctest(code, {}, "the walk", None, 0)


def failures(text: str) -> int:
    options = torch._tensor_str.PRINT_OPTS
    before = (options.precision, options.sci_mode)
    try:
        return doctest.DocTestRunner(verbose=False).run(examples_of(text)).failed
    finally:
        torch.set_printoptions(precision=before[0], sci_mode=before[1])


def test_every_number_of_the_walk_is_what_the_models_own_functions_compute() -> None:
    text = WALK.read_text(encoding="utf-8")
    assert len(examples_of(text).examples) > 80
    assert failures(text) == 0


def test_every_example_of_the_library_page_gives_what_it_says() -> None:
    text = text_of("docs/library.md")
    assert len(examples_of(text).examples) > 40
    assert failures(text) == 0


def test_every_figure_that_is_worked_out_on_the_scaling_page_is_what_the_formulas_give() -> None:
    text = text_of("docs/scaling.md")
    assert len(examples_of(text).examples) > 10
    assert failures(text) == 0


def test_the_measured_table_of_the_scaling_page_is_the_one_that_was_measured() -> None:
    measured = text_of("bench/results/scaling.md").split("\n\n")[-1].strip()
    assert measured.startswith("| where") and measured in text_of("docs/scaling.md")


def test_every_name_in_the_table_of_the_library_page_exists() -> None:
    rows = re.findall(r"`([a-z_0-9]+\.[a-z_0-9]+)`: ((?:`\w+`(?:, )?)+)", text_of("docs/library.md"))
    assert len(rows) >= 6
    for module, names in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_a_wrong_number_in_the_walk_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures(WALK.read_text(encoding="utf-8").replace("0.1385, 0.2379", "0.1385, 0.2378")) == 1
    assert "0.2378" in capsys.readouterr().out


@pytest.mark.parametrize(
    "numbers",
    [
        "[0.9544, 1.4950, 1.4754, 0.8434, 0.7070, 1.0865]",  # note 1
        "[0.1385, 0.2379, 0.2333, 0.1240, 0.1082, 0.1581]",
        "[0.4419, 0.6515, 0.5683]",
        "[0.8400, 0.5800]",  # note 2
        "[0.5000, 0.8000]",
        "[-0.0949,  0.9735, -0.1337,  0.3168]",  # note 10
    ],
)
def test_the_walk_shows_the_known_numbers(numbers: str) -> None:
    assert numbers in WALK.read_text(encoding="utf-8")


def test_each_formula_of_the_walk_stands_beside_a_line_of_the_model() -> None:
    lines = {line.strip() for line in text_of("model.py").splitlines()}
    quoted = re.findall(r"^`model\.py`: `(.+)`$", WALK.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(quoted) >= 11
    for line in quoted:
        assert line in lines, line


def test_no_fraction_in_the_prose_of_the_walk_is_without_an_example() -> None:
    text = WALK.read_text(encoding="utf-8")
    code = "".join(content for _, content in fenced(text))
    for number in re.findall(r"\d+\.\d+", "".join(sections(text))):
        assert number in code, number


@pytest.mark.parametrize(("english", "korean"), TRANSLATED)
def test_the_korean_page_has_the_same_code_formulas_and_quotes(english: str, korean: str) -> None:
    pages = text_of(english), text_of(korean)
    drawings = [[NUMBER.findall(content) for language, content in fenced(page) if not language] for page in pages]
    assert drawings[0] == drawings[1]
    assert [block for block in fenced(pages[0]) if block[0]] == [block for block in fenced(pages[1]) if block[0]]
    for pattern in (r"^\$\$.*\$\$$", r"^`model\.py`: `.+`$", r"^(?:make|python) .*$"):
        found = [re.findall(pattern, page, flags=re.MULTILINE) for page in pages]
        assert found[0] == found[1], pattern


@pytest.mark.parametrize(("english", "korean"), TRANSLATED)
def test_the_korean_page_has_the_same_numbers_and_files_section_by_section(english: str, korean: str) -> None:
    pages = [sections(text_of(name)) for name in (english, korean)]
    assert len(pages[0]) == len(pages[1]) > 5
    for ours, theirs in zip_longest(*pages):
        assert sorted(NUMBER.findall(ours)) == sorted(NUMBER.findall(theirs)), theirs
        names = [set(re.findall(r"`([^`\n]+)`", section)) for section in (ours, theirs)]
        assert names[0] == names[1], names[0] ^ names[1]
        assert ours.count("\n|") == theirs.count("\n|"), "rows of tables"


@pytest.mark.parametrize(("english", "korean"), TRANSLATED)
def test_each_page_points_to_its_translation(english: str, korean: str) -> None:
    assert f"({Path(korean).name})" in text_of(english) and f"({Path(english).name})" in text_of(korean)
    assert len(re.findall(r"[가-힣]", text_of(korean))) > 1000
