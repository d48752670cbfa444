"""Generation: cached or not the same ids, reproducible draws, and what sampling options really allow."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.decoding import NextLogits, StaticStep
from engine.generation import (
    NUCLEUS_AMONG,
    _nucleus,
    choose_tokens,
    generate,
    left_padded,
    penalized,
    sample_stream,
    tokens_seen,
)
from model import GPT, GPTConfig


def gpt(block_size: int = 16, **changes: object) -> GPT:
    torch.manual_seed(3)
    model = GPT(
        GPTConfig(
            **{"block_size": block_size, "vocab_size": 29, "n_layer": 2, "n_head": 2, "n_embd": 16, "tied_head": False}
            | changes
        )
    )  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model.eval()


def ids(model: GPT, prompt: list[int] | Tensor, count: int, **options: object) -> list[list[int]]:
    prompt = torch.tensor([prompt]) if isinstance(prompt, list) else prompt
    return torch.stack(list(generate(model, prompt, count, **options)), dim=1).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(("path", "position"), list(itertools.product(("manual", "sdpa"), ("learned", "rotary"))))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_S06_S07_the_same_ids_with_and_without_cache_also_once_the_window_slides(
    path: str, position: str, temperature: float
) -> None:
    model = gpt(attention_impl=path, position=position)
    for prompt in ([1], [1, 2, 3, 4], list(range(16)), list(range(20))):
        cached = ids(model, prompt, 64, temperature=temperature)
        assert cached == ids(model, prompt, 64, temperature=temperature, kv_cache=False), prompt
        assert len(set(cached[0])) >= 3, "a model that says one thing proves nothing"
        assert cached == ids(model, prompt, 64, temperature=temperature), "no state is left from the first call"


def test_S06_the_window_is_the_last_block_size_tokens() -> None:
    """Against the plainest loop there is."""
    model, said = gpt(), [1, 2, 3]
    for _ in range(40):
        said.append(int(model(torch.tensor([said[-16:]]))[0][0, -1].argmax()))
    assert ids(model, [1, 2, 3], 40, temperature=0, context_shift=1) == [said[3:]]


def test_S03_a_prompt_longer_than_the_context_is_continued_from_its_end() -> None:
    model, prompt = gpt(block_size=32), torch.randint(0, 29, (1, 100))
    for kv_cache in (True, False):
        long = ids(model, prompt, 50, temperature=0, kv_cache=kv_cache)
        assert len(long[0]) == 50
        assert long == ids(model, prompt[:, -32:], 50, temperature=0, kv_cache=kv_cache)


def test_S04_an_empty_prompt_is_a_clear_error_in_the_library() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        ids(gpt(), torch.zeros(1, 0, dtype=torch.int64), 5)
    with pytest.raises(ValueError, match=r"expected \(B, T\)"):
        ids(gpt(), torch.zeros(5, dtype=torch.int64), 5)


def test_S05_a_seed_reproduces_and_another_differs() -> None:
    model = gpt()
    assert ids(model, [1], 30, seed=7) == ids(model, [1], 30, seed=7) != ids(model, [1], 30, seed=8)


def test_S05_a_sample_does_not_depend_on_how_many_are_drawn_with_it_or_how_long() -> None:
    model = gpt().double()
    together = ids(model, torch.ones(5, 1, dtype=torch.int64), 30, seed=7)
    assert together[2] == ids(model, [1], 30, seed=7, samples=[2])[0]
    assert together[2][:10] == ids(model, [1], 10, seed=7, samples=[2])[0]
    assert len({tuple(row) for row in together}) == 5


def test_S05_generation_leaves_the_global_random_stream_alone() -> None:
    before = torch.get_rng_state()
    ids(MODEL, [1], 5, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


MODEL = gpt()


def test_T16_generation_runs_without_dropout_and_restores_the_mode() -> None:
    model = gpt(dropout=0.5)
    expected = ids(model, [1], 20, temperature=0)
    model.train()
    tokens = []
    for token in generate(model, torch.tensor([[1]]), 20, temperature=0):
        assert model.training and torch.is_grad_enabled(), "between tokens everything is as it was"
        tokens.append(token)
    assert torch.stack(tokens, dim=1).tolist() == expected
    model(tokens[0][:, None])[0].sum().backward()  # what was generated may also be learned from


def test_S10_generate_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    ids(MODEL, [1], 20)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "where", ["token_embedding.weight", "blocks.0.attention.query.weight", "blocks.1.feed_forward.output.bias"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_V06_logits_that_are_not_finite_are_never_sampled(where: str, value: float) -> None:
    model = gpt()
    with torch.no_grad():
        dict(model.named_parameters())[where].flatten()[0] = value
    with pytest.raises(FloatingPointError, match="not finite at new token"):
        ids(model, [0, 1], 5)


def test_padded_ids_are_never_sampled() -> None:
    model = gpt(vocab_padding_multiple=64)
    with torch.no_grad():
        model.token_embedding.weight[29:] = 100.0
    drawn = {i for sample in range(20) for i in ids(model, [1], 30, temperature=5.0, seed=sample)[0]}
    assert max(drawn) < 29 and len(drawn) > 20


def draw(logits: list[float], uniform: float, **options: float) -> int:
    return int(
        choose_tokens(
            torch.tensor([logits], dtype=torch.float64), torch.tensor([uniform], dtype=torch.float64), **options
        )
    )  # type: ignore[arg-type]


LOGITS = np.log([0.1, 0.2, 0.05, 0.4, 0.25]).tolist()


def allowed(**options: float) -> set[int]:
    return {draw(LOGITS, u, **options) for u in np.linspace(1e-9, 0.999999, 2000)}


def test_temperature_zero_takes_the_likeliest_and_the_others_the_distribution() -> None:
    assert allowed(temperature=0) == {3} and allowed() == {0, 1, 2, 3, 4}
    counts = np.bincount([draw(LOGITS, u) for u in np.linspace(0, 0.999999, 20000)]) / 20000
    np.testing.assert_allclose(counts, [0.1, 0.2, 0.05, 0.4, 0.25], atol=1e-3)
    half = np.array([0.1, 0.2, 0.05, 0.4, 0.25]) ** 2
    counts = np.bincount([draw(LOGITS, u, temperature=0.5) for u in np.linspace(0, 0.999999, 20000)]) / 20000
    np.testing.assert_allclose(counts, half / half.sum(), atol=1e-3)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300, 1e30])
def test_extreme_temperatures_neither_overflow_nor_crash(temperature: float) -> None:
    got = allowed(temperature=temperature)
    assert got == ({3} if temperature < 1 else {0, 1, 2, 3, 4})


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (1, 1.0, {3}), (2, 1.0, {3, 4}), (4, 1.0, {0, 1, 3, 4}), (5, 1.0, {0, 1, 2, 3, 4}), (99, 1.0, {0, 1, 2, 3, 4}),
        (0, 1e-9, {3}), (0, 0.39, {3}), (0, 0.41, {3, 4}), (0, 0.64, {3, 4}), (0, 0.66, {1, 3, 4}),
        (0, 0.96, {0, 1, 2, 3, 4}),
        (2, 0.5, {3}), (3, 0.9, {1, 3, 4}),
    ],
)  # fmt: skip
def test_top_k_and_top_p_keep_exactly_the_likeliest(top_k: int, top_p: float, expected: set[int]) -> None:
    assert allowed(top_k=top_k, top_p=top_p) == expected


@pytest.mark.parametrize("scales", [(8.0, 8.0), (0.1, 0.1), (8.0, 0.1)])
def test_top_p_keeps_the_same_tokens_whether_few_or_most_of_a_large_vocabulary_reach_it(
    scales: tuple[float, float],
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 4 * NUCLEUS_AMONG, dtype=torch.float64) * torch.tensor(scales)[:, None]
    probabilities = logits.softmax(dim=-1)
    among_few = probabilities.topk(NUCLEUS_AMONG).values.sum(dim=-1) >= 0.9
    assert among_few.tolist() == [scale > 1 for scale in scales]
    kept = _nucleus(probabilities, 0.9) > 0
    for row, mask in zip(probabilities.tolist(), kept.tolist(), strict=True):
        ordered = sorted(row, reverse=True)
        count = next(n for n in range(len(row)) if math.fsum(ordered[: n + 1]) >= 0.9)
        assert [value >= ordered[count] for value in row] == mask


def test_S11_top_p_keeps_of_a_row_what_it_keeps_when_it_is_alone() -> None:
    """Ties, which half precision makes, are broken by how a row is ordered."""
    torch.manual_seed(0)
    scales = torch.tensor([4.0] * 8 + [0.1] * 2)[:, None]
    probabilities = (torch.randn(10, 64 * NUCLEUS_AMONG) * scales).bfloat16().float().softmax(dim=-1)
    together = _nucleus(probabilities, 0.9)
    for row, nucleus in zip(probabilities, together, strict=True):
        assert torch.equal(_nucleus(row[None], 0.9)[0], nucleus)


def test_top_k_keeps_k_among_equals() -> None:
    assert len({draw([1.0] * 6, u, top_k=2) for u in np.linspace(0, 0.999, 200)}) == 2


@settings(deadline=None, max_examples=200)
@given(
    logits=st.lists(st.floats(-50, 50), min_size=1, max_size=12),
    uniform=st.floats(0, 1, exclude_max=True),
    top_k=st.integers(0, 12),
    top_p=st.floats(1e-6, 1),
    temperature=st.floats(1e-3, 10),
)
def test_whatever_is_drawn_is_an_id_of_positive_probability(
    logits: list[float], uniform: float, top_k: int, top_p: float, temperature: float
) -> None:
    drawn = draw(logits, uniform, top_k=top_k, top_p=top_p, temperature=temperature)
    assert 0 <= drawn < len(logits)
    probabilities = ((torch.tensor([logits]).double() - max(logits)) / temperature).softmax(-1)[0]
    assert probabilities[drawn] > 0
    if top_k:
        assert sum(value > probabilities[drawn] for value in probabilities) < top_k


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_sampling_values_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        ids(MODEL, [1], 5, **options)


def test_every_sample_has_a_stream_of_its_own() -> None:
    values = {sample_stream(seed, sample).random() for seed in range(20) for sample in range(20)}
    assert len(values) == 400


# --- prompts of different lengths -----------------------------------------------------------------------------------

RAGGED = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [3], list(range(20))]


def ragged_model(**choices: Any) -> GPT:
    torch.manual_seed(1)
    model = GPT(GPTConfig(block_size=16, vocab_size=23, n_layer=2, n_head=2, n_embd=16, **choices)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


@pytest.mark.parametrize("position", ["learned", "rotary"])
@pytest.mark.parametrize("attention_impl", ["manual", "sdpa"])
@pytest.mark.parametrize("norm_placement", ["pre", "post"])
@pytest.mark.parametrize("kv_cache", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("context_shift", [0, 1, 16])
def test_S11_prompts_of_different_lengths_together_give_what_they_give_alone(
    position: str, attention_impl: str, norm_placement: str, kv_cache: bool, temperature: float, context_shift: int
) -> None:
    """Far beyond the context, where each row forgets at a time of its own."""
    model = ragged_model(position=position, attention_impl=attention_impl, norm_placement=norm_placement)
    options: dict[str, Any] = {
        "temperature": temperature, "seed": 3, "kv_cache": kv_cache, "context_shift": context_shift,
        "repetition_penalty": 1.3, "min_p": 0.02,
    }  # fmt: skip
    prompt, padding = left_padded(RAGGED)
    together = torch.stack(list(generate(model, prompt, 40, padding=padding, **options)), dim=1)
    for row, tokens in enumerate(RAGGED):
        alone = torch.stack(list(generate(model, torch.tensor([tokens]), 40, samples=[row], **options)), dim=1)
        assert together[row].tolist() == alone[0].tolist(), row


def test_S11_the_step_that_is_recorded_on_a_gpu_takes_padding_too() -> None:
    model = ragged_model()
    prompt, padding = left_padded(RAGGED)
    plain = torch.stack(list(generate(model, prompt, 40, padding=padding, temperature=0)), dim=1)
    next_logits = NextLogits(model, len(RAGGED))
    assert next_logits.cache is not None
    next_logits.step = StaticStep(model, next_logits.cache)
    static = torch.stack(
        list(generate(model, prompt, 40, padding=padding, temperature=0, next_logits=next_logits)), dim=1
    )
    assert torch.equal(plain, static)


def test_S11_a_context_of_one_token_takes_prompts_of_different_lengths() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=1, vocab_size=5, n_layer=1, n_head=1, n_embd=4))
    prompt, padding = left_padded([[1], [2, 3, 4]])
    together = torch.stack(list(generate(model, prompt, 6, padding=padding, temperature=0)), dim=1)
    alone = torch.stack(list(generate(model, torch.tensor([[4]]), 6, temperature=0)), dim=1)
    assert together[1].tolist() == alone[0].tolist()


@pytest.mark.parametrize("extreme", [{"temperature": 1e-300}, {"temperature": 1e300}, {"repetition_penalty": 0.01}])
def test_extreme_values_give_tokens(extreme: dict[str, float]) -> None:
    ids = torch.stack(list(generate(ragged_model(), torch.tensor([[1, 2]]), 20, **extreme)))  # type: ignore[arg-type]
    assert ids.max() < 23


def test_prompts_of_equal_length_need_no_padding_and_empty_ones_are_refused() -> None:
    ids, padding = left_padded([[1, 2], [3, 4]])
    assert padding is None and ids.tolist() == [[1, 2], [3, 4]]
    ids, padding = left_padded([[1], [2, 3]])
    assert padding is not None and padding.tolist() == [[True, False], [False, False]] and ids[0, 1] == 1
    for prompts in ([], [[1], []]):
        with pytest.raises(ValueError, match="at least one"):
            left_padded(prompts)


# --- the rules of choosing ------------------------------------------------------------------------------------------


def chosen_among(logits: list[float], **rule: float) -> set[int]:
    """Every id that some draw chooses."""
    draws = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    return set(choose_tokens(torch.tensor([logits]).repeat(1000, 1), draws, **rule).tolist())  # type: ignore[arg-type]


def test_min_p_keeps_tokens_with_a_share_of_the_likeliest_ones_probability() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    for min_p, kept in ((0.0, 4), (0.09, 4), (0.11, 3), (0.29, 3), (0.31, 2), (0.7, 1), (1.0, 1)):
        assert chosen_among(logits, min_p=min_p) == set(range(kept)), min_p


def test_min_p_is_transformers_min_p() -> None:
    warper = transformers.MinPLogitsWarper(min_p=0.2)
    logits = torch.randn(50, 30) * 2
    kept = torch.isfinite(warper(None, logits))
    for row in range(50):
        assert chosen_among(logits[row].tolist(), min_p=0.2) <= set(kept[row].nonzero()[:, 0].tolist())
        assert int(kept[row].sum()) >= len(chosen_among(logits[row].tolist(), min_p=0.2))


def test_the_repetition_penalty_is_transformers_and_spares_padding() -> None:
    logits, prompt = torch.randn(2, 9), torch.tensor([[0, 3, 3], [1, 2, 8]])
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.7)(prompt, logits.clone())
    assert torch.equal(penalized(logits, tokens_seen(prompt, None, 9), 1.7), expected)
    padded = tokens_seen(prompt, torch.tensor([[True, False, False], [False, False, False]]), 9)
    assert padded[0].nonzero()[:, 0].tolist() == [3], "the 0 was padding"


def test_a_strong_penalty_never_says_the_same_twice() -> None:
    model = ragged_model()
    tokens = [int(t) for t in generate(model, torch.tensor([[1, 2]]), 15, temperature=0, repetition_penalty=1e9)]
    assert len({1, 2, *tokens}) == 17
    repeated = [int(t) for t in generate(model, torch.tensor([[1, 2]]), 15, temperature=0)]
    assert len(set(repeated)) < 15


@pytest.mark.parametrize("wrong", [{"min_p": -0.1}, {"min_p": 1.1}, {"repetition_penalty": 0.001}])
def test_sampling_values_out_of_range_are_an_error(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="min_p"):
        next(generate(ragged_model(), torch.tensor([[1]]), 1, **wrong))  # type: ignore[arg-type]


def test_an_observer_is_told_the_models_own_logits_and_what_was_chosen() -> None:
    model, told = ragged_model(), []
    options: dict[str, Any] = {"temperature": 2.0, "top_k": 2, "repetition_penalty": 1.5}
    observed = lambda logits, ids: told.append((logits.clone(), ids.clone()))  # noqa: E731
    ids = list(generate(model, torch.tensor([[1, 2]]), 3, observe=observed, **options))
    assert [chosen.tolist() for _, chosen in told] == [step.tolist() for step in ids]
    sequence = torch.tensor([[1, 2, *[int(step) for step in ids]]])
    torch.testing.assert_close(torch.cat([logits for logits, _ in told]), model(sequence)[0][0, 1:4])
