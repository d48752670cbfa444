"""Evaluation: one number, whatever the batch size; nothing else changes."""

import math
from pathlib import Path

import pytest
import torch

from data.batches import validation_batches
from data.dataset import PreparedData
from engine.evaluation import evaluate, evaluation_mode
from model import GPT, GPTConfig


@pytest.fixture
def model_and_data(char_data: Path) -> tuple[GPT, PreparedData]:
    data = PreparedData(char_data)
    return GPT(
        GPTConfig(block_size=13, vocab_size=data.tokenizer.vocab_size, n_layer=1, n_head=2, n_embd=16, dropout=0.5)
    ), data


def score(model: GPT, data: PreparedData, batch_size: int) -> tuple[float, float, int]:
    batches = validation_batches(data.validation, block_size=13, batch_size=batch_size, device=torch.device("cpu"))
    result = evaluate(model, batches, torch.from_numpy(data.tokenizer.byte_lengths()), torch.float32)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    return result.loss, result.bits_per_byte, result.tokens


def test_E01_the_same_number_for_every_batch_size(model_and_data: tuple[GPT, PreparedData]) -> None:
    model, data = model_and_data
    results = [score(model, data, batch_size) for batch_size in (4, 7, 4, 1000)]
    assert results[0] == results[2]
    for loss, bits, tokens in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6) and bits == pytest.approx(results[0][1], abs=1e-6)
        assert tokens == len(data.validation) - 1


def test_E03_the_mean_is_over_tokens_as_a_plain_loop_computes_it(model_and_data: tuple[GPT, PreparedData]) -> None:
    model, data = model_and_data
    model.eval()
    ids = torch.from_numpy(data.validation.read(0, len(data.validation)).astype("int64"))
    nats, text = 0.0, 0
    assert (len(ids) - 1) % 13 and (len(ids) - 1) // 13 % 7, "the last window and the last batch are short"
    for start in range(0, len(ids) - 1, 13):
        window = ids[start : start + 14]
        with torch.no_grad():
            log_probabilities = model(window[None, :-1])[0][0].log_softmax(-1)
        for position, target in enumerate(window[1:].tolist()):
            nats -= log_probabilities[position, target].item()
            text += len(data.tokenizer.decode([target]).encode())
    loss, bits, _ = score(model, data, 7)
    assert loss == pytest.approx(nats / (len(ids) - 1), abs=1e-6)
    assert bits == pytest.approx(nats / math.log(2) / text, abs=1e-6)


def test_T16_evaluation_runs_without_dropout_and_restores_the_mode(model_and_data: tuple[GPT, PreparedData]) -> None:
    model, data = model_and_data
    model.train()
    in_training = score(model, data, 4)
    assert model.training and all(module.training for module in model.modules())
    model.eval()
    assert score(model, data, 4) == in_training
    assert not model.training


def test_T16_the_mode_is_restored_after_an_error_too(model_and_data: tuple[GPT, PreparedData]) -> None:
    model, _ = model_and_data
    with pytest.raises(RuntimeError), evaluation_mode(model):
        assert not model.training
        raise RuntimeError
    assert model.training and torch.is_grad_enabled()


def test_E02_evaluation_draws_no_random_number(model_and_data: tuple[GPT, PreparedData]) -> None:
    model, data = model_and_data
    before = torch.get_rng_state()
    score(model, data, 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_E03_nothing_to_score_is_an_error_and_not_nan(model_and_data: tuple[GPT, PreparedData]) -> None:
    with pytest.raises(ValueError, match="no tokens to score"):
        evaluate(model_and_data[0], [], torch.ones(10), torch.float32)
