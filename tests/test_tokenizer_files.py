"""Other people's tokenizer files, held to Hugging Face's own library."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import UserError
from data.dataset import PreparedData
from data.patterns import BPE_PATTERN, GPT2_PATTERN
from data.tokenizer_files import (
    byte_letters,
    bytes_of,
    from_huggingface,
    greedy,
    letters_of,
    merges_of,
    to_huggingface,
    tokenizer_from_file,
)
from data.tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer, train_bpe
from tests.conftest import TEXT, assert_clean_error, run_prepare, run_train

MIXED = "안녕하세요 세계! Hello  world's 12345678 tests\n\n\tdef f(x):\r\n return x 👩‍👩‍👧 e\u0301 \x00 العربية \u200b"
BPE = train_bpe([TEXT, MIXED, Path(__file__).read_text(encoding="utf-8")], 600)
KINDS: dict[str, Tokenizer] = {"bpe": BPE, "char": CharTokenizer(set(TEXT + MIXED)), "byte": ByteTokenizer()}


def theirs(tokenizer: Tokenizer) -> Any:
    return tokenizers.Tokenizer.from_str(json.dumps(to_huggingface(tokenizer)))


@pytest.mark.parametrize("kind", list(KINDS))
def test_X01_an_exported_tokenizer_gives_the_same_ids_and_the_same_text(kind: str) -> None:
    ours, other = KINDS[kind], theirs(KINDS[kind])
    for text in (TEXT, MIXED, "", "\n"):
        ids = ours.encode(text).tolist()
        assert other.encode(text).ids == ids and other.decode(ids, skip_special_tokens=False) == text
    assert other.encode("a<|endoftext|>b").ids[1] == ours.end_of_text, "there the marker is always read"


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_exported_tokenizer_comes_back_as_itself(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(theirs(KINDS[kind]).to_str(), encoding="utf-8")  # as their library writes it
    assert tokenizer_from_file(path).sha256() == KINDS[kind].sha256()


@settings(deadline=None, max_examples=150)
@given(st.text(max_size=60))
def test_D14_any_text_round_trips_and_has_the_same_ids_in_their_library(text: str) -> None:
    ids = BPE.encode(text).tolist()
    assert BPE.decode(ids) == text
    assert "<|" in text or theirs_of_bpe().encode(text).ids == ids


_THEIRS: list[Any] = []


def theirs_of_bpe() -> Any:
    if not _THEIRS:
        _THEIRS.append(theirs(BPE))
    return _THEIRS[0]


def trained_by_them(**options: Any) -> Any:
    """A byte-level BPE as their library trains it: special tokens first, then bytes, then merges."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=options.get("special_tokens", ["<|endoftext|>"]),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([TEXT, MIXED, Path(__file__).read_text(encoding="utf-8")], trainer)
    return model


def written(model: Any, path: Path, change: Any = lambda content: None) -> Path:
    content = json.loads(model.to_str())
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_tokenizer_trained_by_their_library_is_read_with_its_ids(tmp_path: Path) -> None:
    model = trained_by_them(special_tokens=["<pad>", "</s>", "<unk>"])
    ours = tokenizer_from_file(written(model, tmp_path / "tokenizer.json"))
    assert ours.end_of_text == 1 and ours.vocab_size == model.get_vocab_size()
    for text in (TEXT, MIXED, "it's 2024, isn't it?   yes"):
        ids = ours.encode(text).tolist()
        assert ids == model.encode(text).ids and ours.decode(ids) == text


def set_at(*place: str, value: Any) -> Any:
    def change(content: dict[str, Any]) -> None:
        for name in place[:-1]:
            content = content[name]
        content[place[-1]] = value

    return change


def swap_merges(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    merges[0], merges[5] = merges[5], merges[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_at("normalizer", value={"type": "NFC"}), "normalizer"),
        (set_at("model", "type", value="Unigram"), "its model is Unigram"),
        (set_at("model", "byte_fallback", value=True), "not a byte-level BPE"),
        (set_at("pre_tokenizer", value={"type": "Metaspace"}), "not ByteLevel"),
        (set_at("pre_tokenizer", "add_prefix_space", value=True), "without a prefix space"),
        (set_at("pre_tokenizer", "use_regex", value=False), "does not cut text"),
        (
            set_at(
                "pre_tokenizer",
                value={
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False},
                        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
                    ],
                },
            ),
            "cuts twice",
        ),
        (set_at("added_tokens", value=[]), "which special token ends a text"),
        (swap_merges, "merges are not in the order"),
        (lambda content: content["model"]["vocab"].update({"zzq": 499}), "is not made of two earlier ones"),
        (lambda content: content["model"].pop("merges"), "merges"),
    ],
)
def test_what_cannot_be_encoded_exactly_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as refusal:
        tokenizer_from_file(written(trained_by_them(), tmp_path / "tokenizer.json", change))
    assert len(str(refusal.value).splitlines()) == 1


def bytes_of_theirs(**changes: Any) -> dict[str, Any]:
    content = to_huggingface(ByteTokenizer())
    content["model"] |= changes
    return content


def test_a_vocabulary_of_bytes_in_another_order_is_not_taken_for_ours(tmp_path: Path) -> None:
    assert from_huggingface(bytes_of_theirs()).sha256() == ByteTokenizer().sha256()
    letters = sorted(byte_letters().values())
    with pytest.raises(ValueError, match="not those of the bytes themselves"):
        from_huggingface(bytes_of_theirs(vocab={letter: i for i, letter in enumerate(letters)}))
    path = tmp_path / "byte.tiktoken"
    lines = [f"{base64.b64encode(bytes([255 - rank])).decode()} {rank}\n" for rank in range(256)]
    path.write_text("".join(lines))
    assert tokenizer_from_file(path).encode("a").tolist() == [255 - ord("a")]


def test_added_tokens_that_are_found_in_plain_text_are_refused(tmp_path: Path) -> None:
    model = trained_by_them()
    model.add_tokens(["the quick"])
    with pytest.raises(UserError, match="'the quick' is found in plain text"):
        tokenizer_from_file(written(model, tmp_path / "tokenizer.json"))


def test_a_pattern_that_the_two_engines_read_differently_is_refused_or_written_so_that_they_do_not() -> None:
    assert greedy(r"\p{N}{1,3}+|\p{L}++") == r"\p{N}{1,3}|\p{L}++"
    content = to_huggingface(BPE)
    split = content["pre_tokenizer"]["pretokenizers"][0]
    assert from_huggingface(content).sha256() == BPE.sha256()
    split["pattern"]["Regex"] = r"\p{N}{1,3}+|\P{N}+"
    with pytest.raises(ValueError, match="our regex engine reads otherwise"):
        from_huggingface(content)


def test_letters_stand_for_all_bytes_as_in_gpt2() -> None:
    assert len(set(byte_letters().values())) == 256
    assert letters_of(b" hello\n") == "ĠhelloĊ" and bytes_of("ĠhelloĊ") == b" hello\n"
    assert all(bytes_of(letters_of(bytes([byte]))) == bytes([byte]) for byte in range(256))


def test_merges_follow_from_the_ranks() -> None:
    ranks = [bytes([byte]) for byte in range(256)] + [b"ab", b"bc", b"abc", b"abcab"]
    assert merges_of(ranks) == [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"abc", b"ab")]
    with pytest.raises(ValueError, match="not made of two earlier ones"):
        merges_of([*ranks, b"xyz"])


def test_a_file_of_tiktokens_ranks_is_read_with_gpt2s_pattern(tmp_path: Path) -> None:
    tokens = [token for token in BPE.ranks if token]
    path = tmp_path / "mine.tiktoken"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    ours = tokenizer_from_file(path)
    assert isinstance(ours, BPETokenizer) and ours.pattern == GPT2_PATTERN != BPE_PATTERN
    assert ours.end_of_text == len(tokens) and ours.decode(ours.encode(MIXED)) == MIXED


@pytest.mark.parametrize(
    "content", ["", "not base64! 1\n", "YQ== x\n", "YQ== 5000000\n", "{", "{}", '{"model": []}', "\ud800"]
)
def test_K08_what_is_no_tokenizer_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("utf-8", errors="surrogatepass"))
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        tokenizer_from_file(path)


def test_a_tokenizer_file_may_be_named_for_preparation_and_training(here: Path) -> None:
    (here / "text.txt").write_text(TEXT, encoding="utf-8")
    model = trained_by_them()
    path = written(model, here / "theirs.json")
    outcome = run_prepare("text.txt", f"--tokenizer={path}", "--out_dir=data")
    assert outcome.status == 0, outcome.stderr
    data = PreparedData(here / "data")
    tokens = [*data.train.read(0, 10**6).tolist(), *data.validation.read(0, 10**6).tolist()]
    assert tokens == [*model.encode(TEXT).ids, model.token_to_id("<|endoftext|>")]
    options = ("--tokenizer=theirs.json", "--n_layer=1", "--n_head=1", "--n_embd=8", "--block_size=8", "--max_iters=0")
    assert run_train("--text=text.txt", *options, "--out_dir=run", "--device=cpu", "--report=false").status == 0
    assert_clean_error(run_prepare("text.txt", "--tokenizer=missing.json"), "missing.json: no such file")
    assert_clean_error(run_prepare("text.txt", f"--tokenizer={here}"), "a folder")


def test_another_file_of_the_same_name_is_another_preparation(here: Path) -> None:
    (here / "text.txt").write_text(TEXT, encoding="utf-8")
    folders = set()
    for special in ("<|endoftext|>", "</s>"):
        written(trained_by_them(special_tokens=[special, "<x>"]), here / "theirs.json")
        outcome = run_prepare("text.txt", "--tokenizer=theirs.json")
        folders.add(outcome.stdout.split("--data_dir=")[1])
    assert len(folders) == 2
