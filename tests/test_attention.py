"""The attention functions against worked numbers, loops, a hand-written backward pass and central differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model import (
    GPTConfig,
    KVCache,
    LayerKVCache,
    MultiHeadAttention,
    apply_causal_score_mask,
    attention_score_matrix,
    fused_attention,
    normalize_attention_scores,
    weighted_value_context,
)
from tests.reference import attention_backward, attention_forward, loop_attention, split

PATHS = ("manual", "sdpa")
SIX_TOKENS = torch.tensor(
    [[0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64], [0.22, 0.58, 0.33],
     [0.77, 0.25, 0.10], [0.05, 0.80, 0.55]],
    dtype=torch.float64,
)  # fmt: skip


def manual(queries: Tensor, keys: Tensor, values: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    scores = attention_score_matrix(queries, keys, math.sqrt(queries.shape[-1]))
    return weighted_value_context(normalize_attention_scores(apply_causal_score_mask(scores, key_padding_mask)), values)


ATTENTION = {"manual": manual, "sdpa": fused_attention}


def module(path: str, n_embd: int, n_head: int, *, bias: bool = True) -> MultiHeadAttention:
    return MultiHeadAttention(
        GPTConfig(block_size=64, n_embd=n_embd, n_head=n_head, bias=bias, attention_impl=path)  # type: ignore[arg-type]
    )


def pair(n_embd: int, n_head: int, dtype: torch.dtype = torch.float64) -> dict[str, MultiHeadAttention]:
    """The two paths with the same weights."""
    both = {path: module(path, n_embd, n_head).to(dtype) for path in PATHS}
    both["sdpa"].load_state_dict(both["manual"].state_dict())
    return both


def random_qkv(B: int, H: int, T: int, S: int, D: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(B, H, length, D, dtype=dtype) for length in (T, S, S)]


# --- attention-notes, item by item ---------------------------------------------------------------------------------


def test_note_1_unprojected_self_attention_of_one_query() -> None:
    scores = attention_score_matrix(SIX_TOKENS[1:2], SIX_TOKENS)
    weights = normalize_attention_scores(scores)
    context = weighted_value_context(weights, SIX_TOKENS)
    torch.testing.assert_close(scores[0].tolist(), [0.9544, 1.495, 1.4754, 0.8434, 0.707, 1.0865], atol=5e-5, rtol=0)
    torch.testing.assert_close(weights[0].tolist(), [0.1385, 0.2379, 0.2333, 0.124, 0.1082, 0.1581], atol=5e-5, rtol=0)
    torch.testing.assert_close(context[0].tolist(), [0.4419, 0.6515, 0.5683], atol=5e-5, rtol=0)
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-15)


def test_note_1_the_fused_path_gives_the_same_context() -> None:
    """Its fixed scale is undone beforehand; as the only query, row 1 may see every key."""
    x = SIX_TOKENS[None, None]
    context = fused_attention(x[:, :, 1:2] * math.sqrt(3), x, x)
    torch.testing.assert_close(context[0, 0, 0].tolist(), [0.4419, 0.6515, 0.5683], atol=5e-5, rtol=0)


def test_note_1_all_queries_give_one_row_each() -> None:
    scores = attention_score_matrix(SIX_TOKENS, SIX_TOKENS)
    weights = normalize_attention_scores(scores)
    context = weighted_value_context(weights, SIX_TOKENS)
    assert (scores.shape, weights.shape, context.shape) == ((6, 6), (6, 6), (6, 3))
    torch.testing.assert_close(context[1].tolist(), [0.4419, 0.6515, 0.5683], atol=5e-5, rtol=0)


def test_note_2_given_weights() -> None:
    values = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
    weights = torch.tensor([[0.42, 0.16, 0.42], [0.16, 0.42, 0.42], [0.21, 0.21, 0.58]], dtype=torch.float64)
    expected = torch.tensor([[0.84, 0.58], [0.58, 0.84], [0.79, 0.79]], dtype=torch.float64)
    torch.testing.assert_close(weighted_value_context(weights, values), expected)
    row = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(weighted_value_context(row, values).tolist(), [[0.5, 0.8]])


def test_note_3_the_scale_brings_the_variance_of_scores_to_one() -> None:
    q, k = torch.randn(2, 2000, 64, dtype=torch.float64)
    assert attention_score_matrix(q, k).std().item() == pytest.approx(8.0, rel=0.02)
    assert attention_score_matrix(q, k, math.sqrt(64)).std().item() == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_note_4_blocked_keys_have_weight_exactly_zero(dtype: torch.dtype) -> None:
    scores = apply_causal_score_mask(torch.full((5, 5), -3e4, dtype=dtype))
    above = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert torch.all(scores[above] == -torch.inf) and torch.all(scores[~above] == -3e4)
    weights = normalize_attention_scores(scores)
    assert torch.all(weights[above] == 0)
    torch.testing.assert_close(weights.double().sum(-1), torch.ones(5, dtype=torch.float64), atol=0.01, rtol=0)


@pytest.mark.parametrize("path", PATHS)
def test_note_4_a_blocked_key_has_no_influence_at_all(path: str) -> None:
    q, k, v = random_qkv(2, 2, 4, 4, 4)
    padding = torch.tensor([[False, True, False, False]] * 2)
    before = ATTENTION[path](q, k, v, padding)
    k[:, :, 1], v[:, :, 1] = 1e12, 1e300
    assert torch.equal(ATTENTION[path](q, k, v, padding), before)


def test_note_4_a_finite_mask_value_is_not_enough() -> None:
    """Why the mask is -inf: float16 cannot hold -1e9, and in float32 a score of that size is not masked by it."""
    assert torch.tensor(-1e9).half().item() == -math.inf
    scores = torch.full((1, 2), -1e9)
    assert scores.masked_fill(torch.tensor([[False, True]]), -1e9).softmax(-1)[0, 1] == 0.5
    assert normalize_attention_scores(scores.masked_fill(torch.tensor([[False, True]]), -torch.inf))[0, 1] == 0


def test_note_5_our_padding_mask_is_true_where_blocked_and_sdpas_where_allowed() -> None:
    q, k, v = random_qkv(1, 1, 3, 3, 4)
    padding = torch.tensor([[True, False, False]])
    allowed = ~padding[:, None, None, :] & torch.ones(3, 3, dtype=torch.bool).tril()
    ours = manual(q, k, v, padding)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    torch.testing.assert_close(ours[..., 1:, :], theirs[..., 1:, :])


@pytest.mark.parametrize("path", PATHS)
def test_note_6_dropout_acts_in_training_and_never_in_evaluation(path: str) -> None:
    attention = MultiHeadAttention(GPTConfig(n_embd=8, n_head=2, dropout=0.5, attention_impl=path))  # type: ignore[arg-type]
    x = torch.randn(2, 6, 8)
    assert not torch.equal(attention(x)[0], attention(x)[0])
    attention.eval()
    assert torch.equal(attention(x)[0], attention(x)[0])


def test_note_6_weights_after_dropout_need_not_sum_to_one_but_those_returned_do() -> None:
    dropped = normalize_attention_scores(torch.zeros(1, 7), torch.nn.Dropout(0.5))
    assert dropped.sum().item() != pytest.approx(1.0, abs=1e-2)
    attention = MultiHeadAttention(GPTConfig(n_embd=8, n_head=2, dropout=0.5))
    _, weights = attention(torch.randn(2, 6, 8), return_attention_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 6))


def test_note_7_heads_are_split_by_view_then_transpose_and_merged_by_the_reverse() -> None:
    attention = module("manual", 768, 12)
    x = torch.arange(2 * 10 * 768, dtype=torch.float32).view(2, 10, 768)
    heads = attention.split_heads(x)
    assert heads.shape == (2, 12, 10, 64)
    torch.testing.assert_close(heads, split(x, 12))
    assert not torch.equal(heads, x.view(2, 12, 10, 64)), "viewing straight as (B, H, T, D) mixes positions"
    torch.testing.assert_close(attention.merge_heads(heads), x)
    assert not heads.is_contiguous() and heads.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("n_head", [1, 2, 4, 12])
def test_note_8_the_projections_have_four_c_squared_weights_whatever_the_heads(n_head: int) -> None:
    attention = module("manual", 48, n_head, bias=False)
    assert sum(parameter.numel() for parameter in attention.parameters()) == 4 * 48**2


# --- The backward pass, items 9 and 10 -----------------------------------------------------------------------------

TWO_HEADS_X = torch.tensor([[[1, 0.5, -0.5, 0.2], [0.1, 1, 0.3, -0.2], [-0.4, 0.2, 1, 0.7]]], dtype=torch.float64)
TWO_HEADS_G = torch.tensor([[[0.2, -0.1, 0.3, 0.4], [0.1, 0.5, -0.2, 0.3], [-0.3, 0.4, 0.2, 0.1]]], dtype=torch.float64)
TWO_HEADS_WEIGHTS = {
    name: torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for name, diagonal in (
        ("query", [1, 0.8, 0.6, 1.2]),
        ("key", [0.7, 1.1, 0.9, 0.5]),
        ("value", [1, 2, 1, 2]),
        ("output", [0.5, 1, 1.5, 0.8]),
    )
}
TWO_HEADS_OUTPUT = [
    [0.5, 1.0, -0.75, 0.32],
    [0.245186, 1.566253, -0.112375, -0.020067],
    [0.087325, 1.14371, 0.675199, 0.525115],
]
TWO_HEADS_DX = [
    [0.083948, 0.383648, 0.364742, 0.872071],
    [-0.094924, 0.97354, -0.133747, 0.316798],
    [-0.042842, 0.331237, 0.236996, 0.138583],
]


def with_weights(path: str, weights: dict[str, Tensor], n_head: int) -> MultiHeadAttention:
    attention = module(path, weights["query"].shape[0], n_head, bias=False).double()
    with torch.no_grad():
        for name, weight in weights.items():
            getattr(attention, name).weight.copy_(weight.T)  # nn.Linear keeps (out, in)
    return attention


def module_gradients(
    path: str, x: Tensor, weights: dict[str, Tensor], n_head: int, gradient: Tensor, padding: Tensor | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    attention = with_weights(path, weights, n_head)
    x = x.clone().requires_grad_()
    output, _ = attention(x, padding)
    output.backward(gradient)
    assert x.grad is not None
    return output.detach(), x.grad, {name: getattr(attention, name).weight.grad.T for name in weights}


def causal(T: int) -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).triu(1)


def test_note_10_hand_written_backward_of_the_two_head_case() -> None:
    output, _ = attention_forward(TWO_HEADS_X, TWO_HEADS_WEIGHTS, 2, causal(3))
    dx, _ = attention_backward(TWO_HEADS_X, TWO_HEADS_WEIGHTS, 2, causal(3), TWO_HEADS_G)
    torch.testing.assert_close(output[0].tolist(), TWO_HEADS_OUTPUT, atol=5e-7, rtol=0)
    torch.testing.assert_close(dx[0].tolist(), TWO_HEADS_DX, atol=5e-7, rtol=0)


@pytest.mark.parametrize("path", PATHS)
def test_note_10_both_paths_reproduce_the_two_head_case_and_its_gradients(path: str) -> None:
    output, dx, gradients = module_gradients(path, TWO_HEADS_X, TWO_HEADS_WEIGHTS, 2, TWO_HEADS_G)
    torch.testing.assert_close(output[0].tolist(), TWO_HEADS_OUTPUT, atol=5e-7, rtol=0)
    torch.testing.assert_close(dx[0].tolist(), TWO_HEADS_DX, atol=5e-7, rtol=0)
    _, expected = attention_backward(TWO_HEADS_X, TWO_HEADS_WEIGHTS, 2, causal(3), TWO_HEADS_G)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-12, rtol=0, msg=name)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("of", ["x", "query", "key", "value", "output"])
def test_note_10_central_differences_agree_with_both_paths(path: str, of: str) -> None:
    _, dx, gradients = module_gradients(path, TWO_HEADS_X, TWO_HEADS_WEIGHTS, 2, TWO_HEADS_G)
    analytic = dx if of == "x" else gradients[of]
    h = 1e-5

    def loss(change: Tensor) -> float:
        x = TWO_HEADS_X + change if of == "x" else TWO_HEADS_X
        weights = TWO_HEADS_WEIGHTS if of == "x" else TWO_HEADS_WEIGHTS | {of: TWO_HEADS_WEIGHTS[of] + change}
        with torch.no_grad():
            return (with_weights(path, weights, 2)(x)[0] * TWO_HEADS_G).sum().item()

    for position in range(analytic.numel()):
        change = torch.zeros(analytic.numel(), dtype=torch.float64)
        change[position] = h
        change = change.view(analytic.shape)
        numeric = (loss(change) - loss(-change)) / (2 * h)
        assert numeric == pytest.approx(analytic.flatten()[position].item(), abs=1e-8)


@pytest.mark.parametrize("path", PATHS)
@settings(deadline=None, max_examples=25)
@given(
    B=st.integers(1, 3), T=st.integers(1, 7), n_head=st.integers(1, 4), D=st.integers(1, 4), seed=st.integers(0, 2**31)
)
def test_note_9_the_hand_written_backward_is_autograds_on_random_inputs(
    path: str, B: int, T: int, n_head: int, D: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    C = n_head * D

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    weights = {name: normal(C, C) for name in ("query", "key", "value", "output")}
    x, gradient = normal(B, T, C), normal(B, T, C)
    padding = torch.rand(B, T, generator=generator) < 0.3
    padding[:, 0] = False  # the formulas hold where every row has an allowed key
    blocked = causal(T) | padding[:, None, None, :]
    output, dx, gradients = module_gradients(path, x, weights, n_head, gradient, padding)
    expected_output, _ = attention_forward(x, weights, n_head, blocked)
    expected_dx, expected = attention_backward(x, weights, n_head, blocked, gradient)
    torch.testing.assert_close(output, expected_output, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(dx, expected_dx, atol=1e-10, rtol=1e-10)
    for name in weights:
        torch.testing.assert_close(gradients[name], expected[name], atol=1e-10, rtol=1e-10, msg=name)


# --- Both paths agree ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@settings(deadline=None, max_examples=30)
@given(T=st.integers(1, 6), cached=st.integers(0, 5), D=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_attention_is_what_a_loop_computes(path: str, T: int, cached: int, D: int, seed: int) -> None:
    torch.manual_seed(seed)
    S = cached + T
    q, k, v = random_qkv(1, 1, T, S, D)
    blocked = torch.tensor([[s > cached + t for s in range(S)] for t in range(T)])
    expected = loop_attention(q[0, 0], k[0, 0], v[0, 0], blocked)
    torch.testing.assert_close(ATTENTION[path](q, k, v)[0, 0], expected, atol=1e-12, rtol=1e-12)


def run_module(
    attention: MultiHeadAttention, x: Tensor, cached: int, padding: Tensor | None, gradient: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output for the positions after `cached`, and every parameter's gradient."""
    attention.zero_grad()
    cache = None
    if cached:
        config = attention.config
        shape = (x.shape[0], config.n_head, x.shape[1], config.head_width)
        cache = LayerKVCache(torch.zeros(shape, dtype=x.dtype), torch.zeros(shape, dtype=x.dtype))
        with torch.no_grad():
            attention(x[:, :cached], None if padding is None else padding[:, :cached], cache)
    output, _ = attention(x[:, cached:], padding, cache)
    output.backward(gradient[:, cached:])
    return output.detach(), {name: p.grad.clone() for name, p in attention.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@settings(deadline=None, max_examples=60)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 9),
    cached=st.integers(0, 6),
    n_head=st.integers(1, 4),
    D=st.integers(1, 8),
    masked=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_both_paths_agree_in_outputs_and_every_gradient(
    dtype: torch.dtype, tolerance: float, B: int, T: int, cached: int, n_head: int, D: int, masked: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    both = pair(n_head * D, n_head, dtype)
    x, gradient = torch.randn(2, B, cached + T, n_head * D, dtype=dtype)
    padding = torch.rand(B, cached + T) < 0.4 if masked else None  # some rows then have no key at all
    output, gradients = run_module(both["manual"], x, cached, padding, gradient)
    fused_output, fused_gradients = run_module(both["sdpa"], x, cached, padding, gradient)
    torch.testing.assert_close(output, fused_output, atol=tolerance, rtol=tolerance)
    assert gradients.keys() == fused_gradients.keys() and len(gradients) == 8
    for name, value in gradients.items():
        torch.testing.assert_close(value, fused_gradients[name], atol=tolerance, rtol=tolerance, msg=name)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    T=st.integers(24, 128),
    cached=st.sampled_from([0, 1, 17]),
    n_head=st.integers(1, 4),
    D=st.sampled_from([16, 24, 32, 64]),
    masked=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_in_bfloat16_neither_path_is_twice_as_far_from_float32_as_the_other(
    T: int, cached: int, n_head: int, D: int, masked: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    both = pair(n_head * D, n_head, torch.bfloat16)
    x, gradient = torch.randn(2, 4, cached + T, n_head * D).bfloat16()
    padding = None
    if masked:
        padding = torch.rand(4, cached + T) < 0.3
    exact = module("manual", n_head * D, n_head)
    exact.load_state_dict({k: v.float() for k, v in both["manual"].state_dict().items()})
    expected = run_module(exact, x.float(), cached, padding, gradient.float())
    errors = {}
    for path, attention in both.items():
        output, gradients = run_module(attention, x, cached, padding, gradient)
        errors[path] = {"output": (output.float() - expected[0]).norm().item()}
        for name in gradients:
            errors[path][name] = (gradients[name].float() - expected[1][name]).norm().item()
    for name in errors["manual"]:
        if name == "key.bias":
            continue  # its true gradient is zero (a constant added to a row of scores), so all of it is noise
        assert errors["manual"][name] <= 2 * errors["sdpa"][name], (name, errors)
        assert errors["sdpa"][name] <= 2 * errors["manual"][name], (name, errors)


@pytest.mark.parametrize("path", PATHS)
def test_casting_a_module_does_not_round_its_scale(path: str) -> None:
    attention = module(path, 96, 3)  # D = 32: sqrt(32) = 5.656854..., 5.65625 in bfloat16
    for cast in (attention.bfloat16(), attention.half(), attention.float()):
        assert cast.scale.item() == pytest.approx(math.sqrt(32), rel=1e-7)
    assert attention.double().scale.item() == math.sqrt(32)
    assert "scale" in attention.state_dict() and "scale" not in dict(attention.named_parameters())


# --- Cases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_A03_true_in_the_padding_mask_blocks_a_key(path: str) -> None:
    """Equal scores, so the context is the mean of the values a query may see: computed by hand."""
    q, k = torch.zeros(2, 1, 1, 3, 2, dtype=torch.float64)
    v = torch.tensor([[[[1.0, 0], [2, 0], [4, 0]]]], dtype=torch.float64)
    context = ATTENTION[path](q, k, v, torch.tensor([[False, True, False]]))
    torch.testing.assert_close(context[0, 0, :, 0].tolist(), [1.0, 1.0, 2.5])


def test_A03_known_mask_gives_known_weights() -> None:
    scores = apply_causal_score_mask(torch.zeros(1, 3, 3), torch.tensor([[True, False, False]]))
    expected = [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.5, 0.5]]
    torch.testing.assert_close(normalize_attention_scores(scores)[0].tolist(), expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        (torch.zeros(2, 4), TypeError, "expected torch.bool"),
        (torch.zeros(2, 4, dtype=torch.int64), TypeError, "expected torch.bool"),
        (torch.zeros(2, 3, dtype=torch.bool), ValueError, r"expected \(B, S\) = \(2, 4\)"),
        (torch.zeros(4, 4, 4, dtype=torch.bool), ValueError, r"expected \(B, S\)"),
    ],
)
def test_A03_a_mask_of_wrong_dtype_or_shape_is_an_error(
    path: str, mask: Tensor, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ATTENTION[path](*random_qkv(2, 1, 4, 4, 2), mask)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [1, 2])
def test_A03_a_mask_for_another_batch_is_an_error(path: str, rows: int) -> None:
    with pytest.raises(ValueError, match=rf"\({rows}, 4\): expected \(B, S\) = \(3, 4\)"):
        ATTENTION[path](*random_qkv(3, 1, 4, 4, 2), torch.zeros(rows, 4, dtype=torch.bool))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_A05_a_row_without_any_key_is_zero_with_zero_gradient(path: str, dtype: torch.dtype) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in random_qkv(2, 2, 4, 4, 4, dtype))
    padding = torch.tensor([[True, True, False, False], [False, False, False, False]])
    context = ATTENTION[path](q, k, v, padding)
    assert torch.all(context[0, :, :2] == 0) and torch.all(context[1] != 0)
    context.sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad is not None and torch.isfinite(tensor.grad).all()
    assert torch.all(q.grad[0, :, :2] == 0), "rows that see nothing"
    assert torch.all(k.grad[0, :, :2] == 0) and torch.all(v.grad[0, :, :2] == 0), "keys that nobody sees"


def test_A05_an_empty_row_of_scores_has_gradient_zero_by_itself() -> None:
    """Without the masking before it, which would hide a NaN."""
    scores = torch.tensor([[-torch.inf, -torch.inf], [0.5, -torch.inf], [1.0, 2.0]], requires_grad=True)
    weights = normalize_attention_scores(scores)
    (weights * torch.tensor([1.0, 5.0])).sum().backward()
    assert scores.grad is not None and torch.isfinite(scores.grad).all()
    assert torch.all(scores.grad[0] == 0) and torch.all(scores.grad[2] != 0)


def test_A05_no_backend_is_ever_asked_about_a_row_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would answer has changed between versions and differs between devices."""
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*arguments: Tensor, attn_mask: Tensor, **options: float) -> Tensor:
        assert attn_mask.any(dim=-1).all()
        return real(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    fused_attention(*random_qkv(2, 2, 4, 4, 4), torch.tensor([[True, True, False, False], [True] * 4]))


@pytest.mark.parametrize("path", PATHS)
def test_A05_everything_hidden_gives_zeros(path: str) -> None:
    context = ATTENTION[path](*random_qkv(1, 1, 3, 3, 2), torch.ones(1, 3, dtype=torch.bool))
    assert torch.all(context == 0)


def test_A06_a_mask_and_the_causal_flag_are_never_passed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*arguments: Tensor, **options: object) -> Tensor:
        calls.append(options)
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    for T, S in ((4, 4), (1, 4), (3, 4)):
        for padding in (None, torch.tensor([[True, False, False, False]])):
            q, k, v = random_qkv(1, 2, T, S, 4)
            torch.testing.assert_close(fused_attention(q, k, v, padding), manual(q, k, v, padding))
    assert len(calls) == 6
    assert not any(options.get("is_causal") and options.get("attn_mask") is not None for options in calls)


@pytest.mark.parametrize("path", PATHS)
def test_A08_scores_are_divided_by_the_root_of_the_head_width(path: str) -> None:
    """n_embd 64 in 4 heads: sqrt(16) = 4. With one-hot values the context shows the softmax of the scaled scores."""
    attention = module(path, 64, 4)
    assert attention.scale.item() == 4.0
    torch.testing.assert_close(
        attention_score_matrix(torch.ones(1, 16), torch.ones(1, 16), attention.scale).item(), 4.0
    )
    identity = torch.eye(64, dtype=torch.float64)
    attention = with_weights(path, dict.fromkeys(("query", "key", "value", "output"), identity), 4)
    x = torch.zeros(1, 2, 64, dtype=torch.float64)
    x[0, 0, 0], x[0, 1, 1], x[0, 1, 0] = 1.0, 1.0, 2.0  # second query: 2 with the first key, 5 with itself
    output, _ = attention(x)
    expected = math.exp(5 / 4) / (math.exp(2 / 4) + math.exp(5 / 4))
    assert output[0, 1, 1].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 100.0, 6e4])
def test_A09_large_scores_in_half_precision_give_no_nan(dtype: torch.dtype, size: float) -> None:
    scores = (torch.randn(2, 3, 8, 8) * size).clamp(-6e4, 6e4).to(dtype)
    scores[0, 0] = -6e4
    weights = normalize_attention_scores(apply_causal_score_mask(scores))
    assert torch.isfinite(weights).all()
    assert torch.all(weights[..., torch.ones(8, 8, dtype=torch.bool).triu(1)] == 0)
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(2, 3, 8), atol=0.02, rtol=0)


def test_A09_float16_products_that_would_overflow_before_scaling_stay_finite() -> None:
    queries = torch.full((1, 64), 40.0, dtype=torch.float16)  # 64 * 40 * 40 = 102,400 > 65,504; / 8 = 12,800
    assert attention_score_matrix(queries, queries, 8.0).item() == pytest.approx(12800)


@pytest.mark.parametrize("path", PATHS)
def test_A10_more_queries_than_keys_is_a_clear_error(path: str) -> None:
    with pytest.raises(ValueError, match="5 queries but only 4 keys"):
        ATTENTION[path](*random_qkv(1, 1, 5, 4, 2))


def test_the_cache_refuses_more_than_it_holds() -> None:
    cache = KVCache(GPTConfig(block_size=4, n_embd=4, n_head=2, n_layer=1), batch_size=1)
    with pytest.raises(ValueError, match="holds 4 positions, 5 are needed"):
        cache.layers[0].append(*torch.zeros(2, 1, 2, 5, 2))


def test_asking_for_weights_takes_the_manual_path_and_gives_the_same_output(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = module("sdpa", 16, 2).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    fused, none = attention(x)
    assert none is None
    monkeypatch.setattr("model.fused_attention", None)  # calling it now would fail
    output, weights = attention(x, return_attention_weights=True)
    torch.testing.assert_close(output, fused, atol=1e-12, rtol=0)
    assert weights.shape == (2, 2, 5, 5)
