"""Checkpoints: whole or not at all, plain data, and loadable wherever they come from."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from config.errors import UserError
from data.tokenizers import CharTokenizer
from engine.checkpoint import (
    FORMAT_VERSION,
    load_checkpoint,
    model_content,
    model_from_checkpoint,
    save_checkpoint,
    tokenizer_from_checkpoint,
)
from model import GPT, GPTConfig
from tests.conftest import REPOSITORY, TEXT, run_sample, run_train

TOKENIZER = CharTokenizer("abc")
DATA = {
    "format_version": 1, "source": "s", "source_sha256": "0", "documents": 1, "characters": 9, "bytes": 9,
    "encoding": "utf-8", "parse_special": False, "tokenizer": "char", "tokenizer_sha256": "0",
    "requested_vocab_size": 300, "vocab_size": 4, "dtype": "uint16", "val_fraction": 0.1, "train_tokens": 9,
    "val_tokens": 0, "train_sha256": "0", "val_sha256": "0", "folder": "f",
}  # fmt: skip


def gpt(**changes: Any) -> GPT:
    return GPT(GPTConfig(**{"block_size": 8, "vocab_size": 4, "n_layer": 2, "n_head": 2, "n_embd": 8} | changes))


def content(model: GPT) -> dict[str, Any]:
    return {**model_content(model, TOKENIZER), "step": 3, "data": DATA}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position": "rotary"},
        {"tied_head": False, "bias": False},
        {"norm_placement": "pre", "vocab_padding_multiple": 64},
    ],
)
def test_a_model_is_the_same_after_saving_and_loading(changes: dict[str, Any], tmp_path: Path) -> None:
    model, path = gpt(**changes).eval(), tmp_path / "c.pt"
    save_checkpoint(path, content(model))
    loaded = load_checkpoint(path)
    restored = model_from_checkpoint(loaded, path).eval()
    idx = torch.randint(0, 4, (2, 8))
    assert restored.config == model.config and torch.equal(restored(idx)[0], model(idx)[0])
    assert tokenizer_from_checkpoint(loaded, path).sha256() == TOKENIZER.sha256()
    for name, buffer in model.named_buffers():
        assert torch.equal(dict(restored.named_buffers())[name], buffer), name


def test_T19_a_tied_head_is_one_storage_after_loading(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", content(gpt()))
    restored = model_from_checkpoint(load_checkpoint(tmp_path / "c.pt"), tmp_path / "c.pt")
    assert restored.head_weight.data_ptr() == restored.token_embedding.weight.data_ptr()
    assert restored.parameter_count() == gpt().parameter_count()


@pytest.mark.parametrize("trained_with", ["manual", "sdpa"])
def test_K06_a_checkpoint_of_one_attention_path_loads_in_the_other(trained_with: str, tmp_path: Path) -> None:
    model, other = gpt(attention_impl=trained_with).eval(), {"manual": "sdpa", "sdpa": "manual"}[trained_with]
    save_checkpoint(tmp_path / "c.pt", content(model))
    restored = model_from_checkpoint(load_checkpoint(tmp_path / "c.pt"), tmp_path / "c.pt", attention_impl=other).eval()
    idx = torch.randint(0, 4, (2, 8))
    torch.testing.assert_close(restored(idx)[0], model(idx)[0])
    restored.crop_block_size(4)
    assert restored(idx[:, :4])[0].shape == (2, 4, 4)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_K02_names_with_the_prefix_of_a_wrapper_are_understood(prefix: str, tmp_path: Path) -> None:
    model = gpt()
    saved = content(model)
    saved["model"] = {prefix + name: value for name, value in saved["model"].items()}
    save_checkpoint(tmp_path / "c.pt", saved)
    restored = model_from_checkpoint(load_checkpoint(tmp_path / "c.pt"), tmp_path / "c.pt")
    assert torch.equal(restored.token_embedding.weight, model.token_embedding.weight)


def test_K02_missing_and_unexpected_names_are_listed(tmp_path: Path) -> None:
    saved = content(gpt())
    saved["model"]["blocks.9.strange"] = saved["model"].pop("blocks.0.attention.query.weight")
    save_checkpoint(tmp_path / "c.pt", saved)
    with pytest.raises(UserError, match=r"blocks\.0\.attention\.query\.weight.*blocks\.9\.strange") as caught:
        model_from_checkpoint(load_checkpoint(tmp_path / "c.pt"), tmp_path / "c.pt")
    assert "\n" not in str(caught.value)


def damaged(path: Path, how: str) -> None:
    whole = path.read_bytes()
    contents = {
        "half": whole[: len(whole) // 2],
        "empty": b"",
        "text": b"this is no checkpoint",
        "cut by a byte": whole[:-1],
    }
    if how in contents:
        path.write_bytes(contents[how])
    elif how == "another kind":
        torch.save([1, 2], path)
    elif how == "without weights":
        save_checkpoint(path, {"step": 3})
    elif how == "with code":
        torch.save({"model": Path("x")}, path)
    elif how == "a later format":
        save_checkpoint(path, {**content(gpt()), "format_version": FORMAT_VERSION + 1})
    else:
        path.unlink()


@pytest.mark.parametrize(
    "how",
    [
        "half",
        "empty",
        "text",
        "cut by a byte",
        "another kind",
        "without weights",
        "with code",
        "a later format",
        "missing",
    ],
)
def test_K08_a_file_that_is_no_checkpoint_is_refused_by_path_and_reason(how: str, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    save_checkpoint(path, content(gpt()))
    damaged(path, how)
    with pytest.raises(UserError, match=r"c\.pt: ") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


class Trap:
    """An object whose unpickling runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_C05_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    torch.save(
        {**content(gpt()), "format_version": FORMAT_VERSION, "trap": Trap(tmp_path / "sprung")}, tmp_path / "c.pt"
    )
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        load_checkpoint(tmp_path / "c.pt")
    assert not (tmp_path / "sprung").exists()


def test_a_tokenizer_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    for tokenizer in (CharTokenizer("abcdef").to_json(), "nonsense", "[]"):
        with pytest.raises(UserError, match=r"c\.pt: its tokenizer"):
            tokenizer_from_checkpoint({**content(gpt()), "tokenizer": tokenizer}, tmp_path / "c.pt")


@pytest.mark.parametrize(
    "change",
    [{"step": -5}, {"step": "3"}, {"data": {}}, {"data": {**DATA, "documents": "x"}}, {"data": {**DATA, "folder": 5}}],
)
def test_K08_a_checkpoint_with_impossible_content_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", {**content(gpt()), **change})
    with pytest.raises(UserError, match=r"c\.pt: "):
        load_checkpoint(tmp_path / "c.pt")


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    saved = content(gpt())
    saved["model_config"]["n_embd"] = 16
    save_checkpoint(tmp_path / "c.pt", saved)
    with pytest.raises(UserError, match="size mismatch"):
        model_from_checkpoint(load_checkpoint(tmp_path / "c.pt"), tmp_path / "c.pt")


def test_a_failed_save_leaves_the_earlier_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.pt"
    save_checkpoint(path, content(gpt()))
    before = path.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(UserError, match=r"No space left on device.*intact"):
        save_checkpoint(path, {**content(gpt()), "step": 4})
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_sampling_does_not_read_what_it_does_not_need(tmp_path: Path) -> None:
    """Mapped loading: the storage of a tensor nobody touches stays on the disk."""
    save_checkpoint(tmp_path / "c.pt", {**content(gpt()), "optimizer": {"large": torch.zeros(1 << 22)}})
    loaded = load_checkpoint(tmp_path / "c.pt")
    mapped = Path("/proc/self/smaps")
    if not mapped.exists():
        pytest.skip("needs /proc")
    lines = mapped.read_text().splitlines()
    start = [i for i, line in enumerate(lines) if line.endswith("c.pt")]
    resident = sum(int(line.split()[1]) for i in start for line in lines[i : i + 4] if line.startswith("Rss:"))
    assert start and resident < 1024, "of 16 MiB"
    assert loaded["optimizer"]["large"].numel() == 1 << 22


@pytest.mark.parametrize(
    ("number", "activation", "begins", "val_loss"),
    [
        (1, "gelu_tanh", "Line 1: the the the the qumps the the the the", 0.9916451382187178),
        (2, "gelu", "Line 10: the quick brown fox jumps over 1 lazy dogs.", 0.7249782359013792),
    ],
)
def test_K07_a_checkpoint_of_every_format_still_samples_and_goes_on(
    number: int, activation: str, begins: str, val_loss: float, here: Path
) -> None:
    """Saved by the programs of their time, as the figures are: format 1 before the activation was a setting."""
    assert number <= FORMAT_VERSION
    (here / "run").mkdir()
    shutil.copy(REPOSITORY / "tests" / "checkpoints" / f"format{number}.pt", here / "run" / "last.pt")
    (here / "text.txt").write_text(TEXT, encoding="utf-8")
    sampled = run_sample("--out_dir=run", "--prompt=Line 1", "--temperature=0", "--max_new_tokens=40")
    assert sampled.stdout.startswith(begins)
    resumed = run_train("--out_dir=run", "--resume", "--max_iters=130")
    assert resumed.status == 0, resumed.stderr
    last = json.loads((here / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["step"] == 130 and last["val_loss"] == pytest.approx(val_loss, abs=1e-4)
    assert load_checkpoint(here / "run" / "last.pt")["model_config"]["activation"] == activation


def test_K07_there_is_a_saved_file_of_every_format() -> None:
    kept = {path.name for path in (REPOSITORY / "tests" / "checkpoints").iterdir()}
    assert kept == {f"format{number}.pt" for number in range(1, FORMAT_VERSION + 1)}
