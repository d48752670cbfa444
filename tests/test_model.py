"""The GPT: causality, caching, padded vocabulary, tied head, initialisation, and what it refuses."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, IGNORED_TARGET, AddNorm, GPTConfig, KVCache, RotaryPositions, rotate_by_position

PATHS = ("manual", "sdpa")
POSITIONS = ("learned", "rotary")
NORMS = ("post", "pre")
every_architecture = pytest.mark.parametrize(
    ("path", "position", "norm"), list(itertools.product(PATHS, POSITIONS, NORMS))
)


def gpt(**changes: object) -> GPT:
    """A small float64 model whose weights are large enough to tell positions apart."""
    model = GPT(GPTConfig(**{"block_size": 9, "vocab_size": 23, "n_layer": 2, "n_head": 2, "n_embd": 8} | changes))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5)
    return model.double().eval()


def tokens(B: int, T: int, vocab_size: int = 23) -> Tensor:
    return torch.randint(0, vocab_size, (B, T))


@every_architecture
def test_note_11_full_forward_chunked_prefill_and_single_tokens_give_the_same_logits(
    path: str, position: str, norm: str
) -> None:
    model, idx = gpt(attention_impl=path, position=position, norm_placement=norm), tokens(2, 9)
    expected = model(idx)[0]
    for chunks in ([9], [1] * 9, [4, 5], [3, 1, 1, 4], [1, 7, 1]):
        cache = KVCache(model.config, batch_size=2, dtype=torch.float64)
        parts = [model(part, cache=cache)[0] for part in idx.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-10, rtol=1e-10, msg=str(chunks))
    for T in range(1, 9):
        torch.testing.assert_close(model(idx[:, :T])[0], expected[:, :T], atol=1e-10, rtol=1e-10, msg=str(T))


@every_architecture
def test_changing_later_tokens_never_changes_earlier_logits(path: str, position: str, norm: str) -> None:
    model = gpt(attention_impl=path, position=position, norm_placement=norm)
    for T in range(1, model.config.block_size + 1):
        idx = tokens(2, T)
        before = model(idx)[0]
        for t in range(1, T):
            changed = idx.clone()
            changed[:, t:] = (changed[:, t:] + 1 + torch.randint(0, 22, (2, T - t))) % 23
            after = model(changed)[0]
            assert torch.equal(after[:, :t], before[:, :t]), (T, t)
            assert not torch.allclose(after[:, t:], before[:, t:]), (T, t)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_both_paths_agree_in_logits_loss_and_every_parameters_gradient(position: str, norm: str) -> None:
    models = {path: gpt(attention_impl=path, position=position, norm_placement=norm) for path in PATHS}
    models["sdpa"].load_state_dict(models["manual"].state_dict())
    idx, targets = tokens(3, 9), tokens(3, 9)
    losses = {}
    for path, model in models.items():
        _, losses[path] = model(idx, targets)
        losses[path].backward()
    torch.testing.assert_close(losses["manual"], losses["sdpa"], atol=1e-12, rtol=0)
    for (name, one), (_, other) in zip(*(model.named_parameters() for model in models.values()), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-10, rtol=1e-10, msg=name)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("position", POSITIONS)
def test_left_padding_does_not_change_what_a_row_says(path: str, position: str) -> None:
    model = gpt(attention_impl=path, position=position)
    short, long = tokens(1, 4), tokens(1, 7)
    padded = torch.cat((F.pad(short, (3, 0)), long))
    padding = torch.tensor([[True] * 3 + [False] * 4, [False] * 7])
    logits = model(padded, key_padding_mask=padding)[0]
    torch.testing.assert_close(logits[:1, 3:], model(short)[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(logits[1:], model(long)[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("position", POSITIONS)
def test_left_padding_works_with_the_cache_too(position: str) -> None:
    model = gpt(position=position)
    idx, padding = tokens(2, 8), torch.tensor([[True, True] + [False] * 6, [False] * 8])
    expected = model(idx, key_padding_mask=padding)[0]
    cache = KVCache(model.config, batch_size=2, dtype=torch.float64)
    first = model(idx[:, :5], key_padding_mask=padding[:, :5], cache=cache)[0]
    rest = [model(idx[:, t : t + 1], key_padding_mask=padding[:, : t + 1], cache=cache)[0] for t in range(5, 8)]
    torch.testing.assert_close(torch.cat((first, *rest), dim=1)[0, 2:], expected[0, 2:], atol=1e-12, rtol=0)


def test_A10_one_token_works_and_one_too_many_is_a_clear_error() -> None:
    model = gpt()
    assert model(tokens(1, 1))[0].shape == (1, 1, 23)
    with pytest.raises(ValueError, match="10 positions: expected 1 to block_size = 9"):
        model(tokens(1, 10))
    with pytest.raises(ValueError, match="0 positions"):
        model(tokens(1, 0))


def test_A10_cached_and_new_positions_together_must_fit() -> None:
    model = gpt()
    cache = KVCache(model.config, batch_size=1, dtype=torch.float64)
    model(tokens(1, 6), cache=cache)
    with pytest.raises(ValueError, match="10 positions"):
        model(tokens(1, 4), cache=cache)
    cache.clear()
    assert cache.length == 0
    model(tokens(1, 9), cache=cache)


@pytest.mark.parametrize("path", PATHS)
def test_returned_weights_are_those_before_dropout_and_the_output_stays_the_same(path: str) -> None:
    model, idx = gpt(attention_impl=path, dropout=0.5), tokens(2, 6)
    logits, loss, weights = model(idx, idx, return_attention_weights=True)
    torch.testing.assert_close(logits, model(idx)[0], atol=1e-12, rtol=0)
    assert loss is not None and [w.shape for w in weights] == [(2, 2, 6, 6)] * 2
    for layer in weights:
        torch.testing.assert_close(layer.sum(-1), torch.ones(2, 2, 6, dtype=torch.float64))
        assert torch.all(layer[..., torch.ones(6, 6, dtype=torch.bool).triu(1)] == 0)


@pytest.mark.parametrize("tied", [True, False])
def test_padded_vocabulary_gives_the_logits_and_loss_of_the_unpadded_one(tied: bool) -> None:
    plain, padded = gpt(tied_head=tied), gpt(tied_head=tied, vocab_padding_multiple=16)
    assert padded.config.padded_vocab_size == 32 and padded.head_weight.shape == (32, 8)
    state = plain.state_dict()
    for name in ("token_embedding.weight", "head.weight"):
        if name in state:
            state[name] = F.pad(state[name], (0, 0, 0, 9), value=9.0)  # extra ids that would win every draw
    padded.load_state_dict(state)
    idx, targets = tokens(2, 9), tokens(2, 9)
    (logits, loss), (padded_logits, padded_loss) = plain(idx, targets), padded(idx, targets)
    assert padded_logits.shape == (2, 9, 23)
    torch.testing.assert_close(padded_logits, logits)
    torch.testing.assert_close(padded_loss, loss)
    padded_loss.backward()
    assert torch.all(padded.head_weight.grad[23:] == 0)  # type: ignore[index]


def test_loss_is_the_mean_cross_entropy_over_targets_that_count() -> None:
    model, idx, targets = gpt(), tokens(2, 9), tokens(2, 9)
    targets[0, :5] = IGNORED_TARGET
    logits, loss = model(idx, targets)
    probabilities = logits.softmax(-1)
    kept = [
        -math.log(probabilities[b, t, targets[b, t]].item()) for b in range(2) for t in range(9) if targets[b, t] >= 0
    ]
    assert len(kept) == 13 and loss is not None
    assert loss.item() == pytest.approx(sum(kept) / 13, abs=1e-12)


def test_T18_the_first_loss_is_that_of_guessing() -> None:
    model = GPT(GPTConfig(block_size=32, vocab_size=500, n_layer=3, n_head=4, n_embd=64))
    _, loss = model(tokens(8, 32, 500), tokens(8, 32, 500))
    assert loss is not None and loss.item() == pytest.approx(math.log(500), abs=0.1)


def test_T19_a_tied_head_is_one_storage_counted_once() -> None:
    tied, untied = (
        GPT(GPTConfig(vocab_size=100, n_layer=1, n_head=1, n_embd=8, block_size=4, tied_head=t)) for t in (True, False)
    )
    assert tied.head_weight.data_ptr() == tied.token_embedding.weight.data_ptr()
    assert untied.parameter_count() - tied.parameter_count() == 100 * 8
    assert not any(name.startswith("head") for name in tied.state_dict())
    restored = GPT(tied.config)
    restored.load_state_dict(tied.state_dict())
    assert restored.head_weight.data_ptr() == restored.token_embedding.weight.data_ptr()


@pytest.mark.parametrize("position", POSITIONS)
def test_K06_both_paths_have_the_same_state_and_can_be_cropped(position: str) -> None:
    models = {path: gpt(attention_impl=path, position=position) for path in PATHS}
    assert models["manual"].state_dict().keys() == models["sdpa"].state_dict().keys()
    idx = tokens(2, 5)
    for one, other in (("manual", "sdpa"), ("sdpa", "manual")):
        models[other].load_state_dict(models[one].state_dict(), strict=True)
        expected = models[one](idx)[0]
        torch.testing.assert_close(models[other](idx)[0], expected, atol=1e-12, rtol=0)
    for model in models.values():
        model.crop_block_size(5)
        torch.testing.assert_close(model(idx)[0], expected, atol=1e-12, rtol=0)
        with pytest.raises(ValueError, match="block_size = 5"):
            model(tokens(1, 6))
        with pytest.raises(ValueError, match="expected 1 to 5"):
            model.crop_block_size(6)


def test_K06_nothing_in_the_state_depends_on_the_context_but_a_learned_table() -> None:
    """A mask or a rotary table in the state would keep weights from a model with another block_size."""
    short, long = gpt(position="rotary", block_size=5), gpt(position="rotary", block_size=9)
    short.load_state_dict(long.state_dict(), strict=True)
    idx = tokens(2, 5)
    torch.testing.assert_close(short(idx)[0], long(idx)[0], atol=1e-12, rtol=0)


def test_note_12_add_norm_places_the_norm_as_said() -> None:
    x, sublayer = torch.randn(2, 3, 8), torch.nn.Linear(8, 8)
    for norm, expected in (
        ("post", lambda: F.layer_norm(x + sublayer(x), (8,))),
        ("pre", lambda: x + sublayer(F.layer_norm(x, (8,)))),
    ):
        add_norm = AddNorm(GPTConfig(n_embd=8, n_head=1, dropout=0.5, norm_placement=norm)).eval()  # type: ignore[arg-type]
        torch.testing.assert_close(add_norm(x, sublayer), expected())


def test_note_12_dropout_acts_on_the_sublayer_and_not_on_the_residual() -> None:
    add_norm = AddNorm(GPTConfig(n_embd=1000, n_head=1, dropout=0.5, norm_placement="pre"))
    change = add_norm(torch.zeros(1, 1000), lambda x: torch.ones_like(x))
    assert set(change.unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(add_norm(torch.full((1, 1000), 5.0), torch.zeros_like), torch.full((1, 1000), 5.0))
    add_norm.norm_placement, x = "post", torch.randn(1, 1000)
    torch.testing.assert_close(add_norm(x, torch.zeros_like), F.layer_norm(x, (1000,)))


def test_only_pre_norm_has_a_final_norm() -> None:
    assert [name for name in gpt(norm_placement="post").state_dict() if name.startswith("final_norm")] == []
    assert "final_norm.weight" in gpt(norm_placement="pre").state_dict()


def test_initial_weights_are_gpt2s() -> None:
    model = GPT(GPTConfig(vocab_size=1000, block_size=128, n_layer=8, n_head=4, n_embd=128, tied_head=False))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.all(parameter == (1.0 if name.endswith("weight") else 0.0)), name
        elif parameter.dim() == 1:
            assert torch.all(parameter == 0), name
        else:
            into_residual = name.endswith(("attention.output.weight", "feed_forward.output.weight"))
            expected = 0.02 / math.sqrt(2 * 8) if into_residual else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


def test_without_biases_no_vector_but_the_norms_weights_is_left() -> None:
    vectors = [name for name, p in gpt(bias=False, norm_placement="pre").named_parameters() if p.dim() == 1]
    assert vectors and all(name.endswith("norm.weight") for name in vectors)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    """RoFormer, equation 16: turning both by their positions leaves a function of the difference."""
    from model import RotaryPositions, rotate_by_position

    rotary = RotaryPositions(GPTConfig(block_size=64, n_embd=16, n_head=1, position="rotary")).double()
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(m: int, n: int) -> float:
        turned = [rotate_by_position(x, rotary(torch.tensor([p]))) for x, p in ((q, m), (k, n))]
        return (turned[0] * turned[1]).sum().item()

    assert score(10, 3) == pytest.approx(score(47, 40), abs=1e-12)
    assert score(10, 3) != pytest.approx(score(10, 4), abs=1e-3)
    assert score(5, 5) == pytest.approx((q * k).sum().item(), abs=1e-12)


def test_a_rotation_turns_the_pair_of_each_half_counterclockwise() -> None:
    """The convention is part of what saved weights mean."""
    rotary = RotaryPositions(GPTConfig(block_size=4, n_embd=4, n_head=1, position="rotary")).double()
    first = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64).expand(1, 1, 2, 4)
    turned = rotate_by_position(first, rotary(torch.tensor([1, 3])))
    for angle, vector in zip((1.0, 3.0), turned[0, 0], strict=True):  # of the first pair: 10000^0 radians a position
        expected = torch.tensor([math.cos(angle), 0.0, math.sin(angle), 0.0], dtype=torch.float64)
        torch.testing.assert_close(vector, expected)


def test_casting_the_model_does_not_round_the_rotary_tables() -> None:
    model = gpt(position="rotary")
    exact = model.rotary_positions.sines.clone()
    model.bfloat16()
    assert model.rotary_positions.sines.dtype == torch.float32
    torch.testing.assert_close(model.rotary_positions.sines.double(), exact, atol=1e-7, rtol=0)
    model.double()
    assert torch.equal(model.rotary_positions.sines, exact)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_embd": 30, "n_head": 4}, "n_embd = 30 is not divisible by n_head = 4"),
        ({"n_embd": 6, "n_head": 2, "position": "rotary"}, "must be even"),
        ({"n_layer": 0}, "n_layer = 0: expected 1 or more"),
        ({"dropout": 1.0}, "dropout = 1.0"),
        ({"attention_impl": "flash"}, "expected manual or sdpa"),
        ({"norm_placement": "both"}, "expected post or pre"),
        ({"position": "alibi"}, "expected learned or rotary"),
    ],
)
def test_C06_C07_an_impossible_architecture_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GPTConfig(**changes)  # type: ignore[arg-type]


class LargestTensor(TorchDispatchMode):
    """Remembers the most numbers that any result inside had."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("at_once", [1, 5 * 24, 47 * 24])
def test_a_loss_taken_in_chunks_has_the_value_and_the_gradients_of_the_whole(
    tied: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gpt(tied_head=tied, vocab_padding_multiple=8).double()  # 23 ids in 24 rows
    idx, targets = tokens(6, 8), tokens(6, 8)
    targets[0, :5] = IGNORED_TARGET
    _, whole = model(idx, targets)
    expected = torch.autograd.grad(whole, list(model.parameters()))
    _, small = model(idx, targets, return_logits=False)
    assert torch.equal(small, whole), "few logits are taken at once"
    monkeypatch.setattr("model.LOGITS_AT_ONCE", at_once)
    none, loss = model(idx, targets, return_logits=False)
    assert none is None
    torch.testing.assert_close(loss, whole)
    for chunked, gradient in zip(torch.autograd.grad(loss / 4, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(chunked, gradient / 4)
    with torch.inference_mode():
        torch.testing.assert_close(model(idx, targets, return_logits=False)[1], whole)


def test_the_logits_never_exist_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, idx = gpt(vocab_size=4000), tokens(6, 8)
    monkeypatch.setattr("model.LOGITS_AT_ONCE", 10 * 4000)
    with LargestTensor() as whole:
        model(idx, idx)[1].backward()
    with LargestTensor() as chunked:
        model(idx, idx, return_logits=False)[1].backward()
    assert whole.numbers == 6 * 8 * 4000 and chunked.numbers <= 4000 * 16, "then the largest is the head's gradient"


def test_a_loss_in_chunks_is_not_rounded_to_the_precision_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    model, idx = gpt().float(), tokens(6, 8)
    monkeypatch.setattr("model.LOGITS_AT_ONCE", 23)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (_, whole), (_, loss) = model(idx, idx), model(idx, idx, return_logits=False)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=1e-6)
    loss.backward()
    with pytest.raises(TypeError):  # rather than wrong gradients
        loss.backward()


def test_the_stacked_projection_is_that_of_the_three_layers() -> None:
    for bias in (True, False):
        attention = gpt(bias=bias).double().blocks[0].attention
        x = torch.randn(2, 5, attention.config.n_embd, dtype=torch.float64)
        for stacked, layer in zip(
            attention.queries_keys_values(x), (attention.query, attention.key, attention.value), strict=True
        ):
            torch.testing.assert_close(stacked, layer(x))


def test_X01_both_forms_of_gelu_are_those_of_their_papers() -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    exact = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    tanh = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    for activation, expected in (("gelu", exact), ("gelu_tanh", tanh)):
        torch.testing.assert_close(gpt(activation=activation).blocks[0].feed_forward.activation(x), expected)
    assert (exact - tanh).abs().max() > 1e-4
