"""Evaluation: one number, whatever the batch size; nothing else changes."""

import math
from pathlib import Path

import pytest
import torch

import engine.evaluation
from data.batches import validation_batches
from data.dataset import PreparedData
from engine.evaluation import evaluate, evaluation_mode
from engine.step_log import read_step_log
from model import GPT, GPTConfig
from tests.conftest import TEXT, TINY, Outcome, assert_clean_error, call, run_prepare, run_train


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


# --- the command ----------------------------------------------------------------------------------------------------


def run_evaluation(*argv: str) -> Outcome:
    return call(engine.evaluation.main, *argv, "--device=cpu")


def figures(outcome: Outcome) -> dict[str, str]:
    assert outcome.status == 0, outcome.stderr
    return dict(line.split(maxsplit=1) for line in outcome.stdout.splitlines())


def test_a_run_is_evaluated_on_its_own_validation_tokens_as_it_was_in_training(char_run: Path) -> None:
    best = min(
        (line for line in read_step_log(char_run / "metrics.jsonl") if "val_loss" in line),
        key=lambda line: line["val_loss"],
    )
    said = figures(run_evaluation(str(char_run), "--dtype=float32"))
    assert said["loss"].startswith(f"{best['val_loss']:.4f} ") and said["bits"].startswith(
        f"{best['val_bits_per_byte']:.4f} "
    )
    assert said["perplexity"] == f"{best['val_perplexity']:.2f}"
    assert f"{best['val_tokens']:,} tokens scored" in said["data"] and "its validation part" in said["data"]


def test_a_text_is_prepared_with_the_models_tokenizer(char_run: Path, here: Path) -> None:
    (here / "other.txt").write_text("the quick brown fox\n" * 9, encoding="utf-8")
    said = figures(run_evaluation(str(char_run / "best.pt"), "--data=other.txt"))
    assert "180 tokens scored" in said["data"] and "other.txt" in said["data"]
    (here / "korean.txt").write_text("한글", encoding="utf-8")
    assert_clean_error(run_evaluation(str(char_run), "--data=korean.txt"), "the char vocabulary has no")


def test_data_that_was_replaced_since_is_not_taken_for_the_runs_own(here: Path) -> None:
    (here / "text.txt").write_text(TEXT, encoding="utf-8")
    assert run_prepare("text.txt", "--tokenizer=byte", "--out_dir=data").status == 0
    trained = run_train("--data_dir=data", "--out_dir=run", "--max_iters=1", *TINY)
    assert trained.status == 0, trained.stderr
    (here / "text.txt").write_text(TEXT[::-1], encoding="utf-8")
    assert run_prepare("text.txt", "--tokenizer=byte", "--out_dir=data").status == 0
    assert_clean_error(run_evaluation("run"), "data", "train_sha256")


def test_the_part_may_be_chosen(char_run: Path, char_data: Path) -> None:
    said = figures(run_evaluation(str(char_run), f"--data={char_data}", "--part=training"))
    assert f"{PreparedData(char_data).metadata.train_tokens - 1:,} tokens scored" in said["data"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere: no such run directory or checkpoint"),
        ([], "run: is missing; expected text (a run directory or a checkpoint)"),
        (["{run}", "--data=missing.txt"], "missing.txt: no such file"),
        (["{run}", "--data=bytes"], "was prepared with another tokenizer (byte) than the model's (char)"),
        (["{run}", "--part=test"], "part = 'test': expected validation or training"),
    ],
)
def test_what_cannot_be_evaluated_is_a_clean_error(
    arguments: list[str], words: str, char_run: Path, here: Path
) -> None:
    (here / "text.txt").write_text(TEXT, encoding="utf-8")
    assert run_prepare("text.txt", "--tokenizer=byte", "--out_dir=bytes").status == 0
    assert_clean_error(run_evaluation(*(argument.format(run=char_run) for argument in arguments)), words)
