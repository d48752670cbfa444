"""Batches: a function of seed and step alone; validation scores every token once."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from config.errors import UserError
from data.batches import TrainingBatches, validation_batches
from data.dataset import TokenFile

CPU = torch.device("cpu")


def token_file_of(path: Path, count: int) -> TokenFile:
    content = np.arange(count, dtype="<u2").tobytes()
    path.write_bytes(content)
    return TokenFile(path, "uint16", 100, count, hashlib.sha256(content).hexdigest())


@pytest.fixture
def token_file(tmp_path: Path) -> TokenFile:
    """The tokens 0 ... 99, so that each token tells where it stood."""
    return token_file_of(tmp_path / "x.bin", 100)


def batches(
    tokens: TokenFile, *, block_size: int = 8, batch_size: int = 4, micro_batches: int = 2, seed: int = 1
) -> TrainingBatches:
    return TrainingBatches(
        tokens, block_size=block_size, batch_size=batch_size, micro_batches=micro_batches, seed=seed, device=CPU
    )


def test_targets_are_the_tokens_that_follow(token_file: TokenFile) -> None:
    for inputs, targets in batches(token_file).global_batch(0):
        assert inputs.shape == targets.shape == (4, 8) and inputs.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_batch_is_a_function_of_seed_and_step(token_file: TokenFile) -> None:
    def inputs(seed: int, step: int) -> torch.Tensor:
        return torch.stack([inputs for inputs, _ in batches(token_file, seed=seed).global_batch(step)])

    assert torch.equal(inputs(1, 5), inputs(1, 5))
    assert not torch.equal(inputs(1, 5), inputs(1, 6)) and not torch.equal(inputs(1, 5), inputs(2, 5))
    two_draws = batches(token_file)
    list(two_draws.global_batch(0))
    assert torch.equal(torch.stack([i for i, _ in two_draws.global_batch(5)]), inputs(1, 5)), "no hidden state"


def test_T09_the_global_batch_does_not_depend_on_how_it_is_cut(token_file: TokenFile) -> None:
    whole = [i for i, _ in batches(token_file, batch_size=8, micro_batches=1).global_batch(3)]
    halves = [i for i, _ in batches(token_file, batch_size=4, micro_batches=2).global_batch(3)]
    assert torch.equal(torch.cat(whole), torch.cat(halves))


def test_every_window_can_be_drawn_up_to_the_very_last(token_file: TokenFile) -> None:
    first_tokens = set()
    for step in range(300):
        for inputs, _ in batches(token_file).global_batch(step):
            first_tokens |= set(inputs[:, 0].tolist())
    assert first_tokens == set(range(92))  # 92 + 8 = 100, so the last window ends in the last token as target


def test_a_file_of_exactly_one_window_works_and_one_token_less_is_refused(tmp_path: Path) -> None:
    tokens = token_file_of(tmp_path / "x.bin", 9)
    assert next(batches(tokens).global_batch(0))[1][0].tolist() == list(range(1, 9))
    with pytest.raises(UserError, match="block_size = 9 needs at least 10"):
        batches(tokens, block_size=9)


@pytest.mark.parametrize("block_size", [1, 8, 9, 11, 33, 98, 99, 100, 500])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_E03_every_token_but_the_first_is_a_target_exactly_once(
    token_file: TokenFile, block_size: int, batch_size: int
) -> None:
    targets = []
    for inputs, following in validation_batches(token_file, block_size=block_size, batch_size=batch_size, device=CPU):
        assert torch.equal(following, inputs + 1) and inputs.shape[0] <= batch_size and inputs.shape[1] <= block_size
        targets += following.flatten().tolist()
    assert sorted(targets) == list(range(1, 100))


def test_D11_a_token_file_is_read_and_never_mapped(token_file: TokenFile) -> None:
    """Mapped pages pile up in a long run; here each window is read into memory of its own."""
    windows = token_file.windows(np.array([0, 50, 92]), 8)
    assert windows[:, 0].tolist() == [0, 50, 92] and windows.dtype == np.int64
    assert "x.bin" not in Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else True
