"""The quick step for one position, held to the model's own forward pass."""

import itertools
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.decoding import PACKED_FROM, NextLogits, StaticStep, quick_linear
from engine.generation import generate
from model import GPT, GPTConfig
from tests.conftest import REPOSITORY

SHAPE = {"block_size": 12, "vocab_size": 29, "n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_padding_multiple": 8}


def gpt(dtype: torch.dtype = torch.float64, **changes: object) -> GPT:
    torch.manual_seed(3)
    model = GPT(GPTConfig(**SHAPE | changes)).to(dtype).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)  # biases and norms, too, are not what they begin with
    return model


ARCHITECTURES = list(
    itertools.product(
        ("manual", "sdpa"), ("learned", "rotary"), ("pre", "post"), (True, False), ("gelu", "gelu_tanh"), (True, False)
    )
)


@pytest.mark.parametrize(("path", "position", "norm", "bias", "activation", "tied"), ARCHITECTURES)
def test_S06_every_step_gives_the_models_own_logits(
    path: str, position: str, norm: str, bias: bool, activation: str, tied: bool
) -> None:
    model = gpt(
        attention_impl=path, position=position, norm_placement=norm, bias=bias, activation=activation, tied_head=tied
    )
    tokens = torch.randint(0, 29, (3, 12))
    next_logits = NextLogits(model, 3)
    static = NextLogits(model, 3)
    assert static.cache is not None
    static.step = StaticStep(model, static.cache)  # what a GPU records, run as it is
    with torch.inference_mode():
        for end in (4, 5, 6, 7, 12):  # a prompt, single positions, several at once
            expected = model(tokens[:, :end])[0][:, -1]
            torch.testing.assert_close(next_logits(tokens[:, :end]), expected)
            torch.testing.assert_close(static(tokens[:, :end]), expected)
            assert static.cache.length == end
        next_logits.clear()
        torch.testing.assert_close(next_logits(tokens[:, :1]), model(tokens[:, :1])[0][:, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16])
def test_S06_a_packed_matrix_gives_the_plain_product(dtype: torch.dtype, rows: int) -> None:
    weight, bias = torch.randn(768, 512, dtype=dtype), torch.randn(768, dtype=dtype)
    assert weight.numel() >= PACKED_FROM
    x = torch.randn(rows, 512, dtype=dtype)
    for b in (bias, None):
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
        error = (quick_linear(weight, b, rows)(x).double() - exact).abs().max()
        plain = (torch.nn.functional.linear(x, weight, b).double() - exact).abs().max()
        assert error <= 6 * plain, (error, plain)


def test_S06_a_large_matrix_is_packed_and_a_small_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch is built without oneDNN, the plain product stands in."""
    large, small = torch.randn(1024, 256), torch.randn(16, 256)
    if torch._C._has_mkldnn:
        assert not isinstance(quick_linear(large, None, 1), partial)
    assert isinstance(quick_linear(small, None, 1), partial)
    for dtype in (torch.float64, torch.float16):  # which oneDNN does not have everywhere
        x = torch.ones(1, 256, dtype=dtype)
        assert torch.equal(quick_linear(large.to(dtype), None, 1)(x), torch.nn.functional.linear(x, large.to(dtype)))
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    assert isinstance(quick_linear(large, None, 1), partial)


def test_S06_half_precision_weights_keep_their_cache_in_float32_on_a_cpu() -> None:
    """Which is quicker there, and more exact; prompts of several tokens are computed in the weights' own precision."""
    model = gpt(torch.bfloat16)
    next_logits, tokens = NextLogits(model, 2), torch.randint(0, 29, (2, 8))
    assert next_logits.cache is not None and next_logits.cache.layers[0].keys.dtype == torch.float32
    with torch.inference_mode():
        for end in (5, 6, 8):
            logits, exact = next_logits(tokens[:, :end]), model(tokens[:, :end])[0][:, -1]
            assert logits.dtype == torch.bfloat16
            torch.testing.assert_close(logits, exact, rtol=0.1, atol=0.1)


def test_S07_the_window_forgets_a_quarter_of_its_tokens_at_once_or_as_many_as_said() -> None:
    """Against the plainest loop there is."""
    model = gpt(torch.float32, block_size=16, norm_placement="pre")
    outcomes = set()
    for context_shift, forgets in ((1, 1), (0, 4), (5, 5), (16, 16)):
        said, window = [1, 2, 3], [1, 2, 3]
        for _ in range(40):
            token = int(model(torch.tensor([window]))[0][0, -1].argmax())
            window = [*(window[forgets:] if len(window) == 16 else window), token]
            said.append(token)
        for kv_cache in (True, False):
            options = {"temperature": 0.0, "context_shift": context_shift, "kv_cache": kv_cache}
            ids = torch.cat(list(generate(model, torch.tensor([[1, 2, 3]]), 40, **options)))  # type: ignore[arg-type]
            assert ids.tolist() == said[3:], (context_shift, kv_cache)
        outcomes.add(tuple(said))
    assert len(outcomes) == 4, "a model that says the same whatever it forgets proves nothing"


def test_S07_a_shift_by_more_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 to block_size = 12"):
        next(generate(gpt(), torch.tensor([[1]]), 1, context_shift=13))


def test_S06_what_was_prepared_serves_several_calls() -> None:
    model = gpt(torch.float32)
    prepared = NextLogits(model, 1)
    prompt = torch.tensor([[1, 2]])
    fresh = torch.cat(list(generate(model, prompt, 30, seed=5)))
    for _ in range(2):
        assert torch.equal(torch.cat(list(generate(model, prompt, 30, seed=5, next_logits=prepared))), fresh)


def test_a_saved_model_is_loaded_without_the_compiler_and_without_drawing_weights(char_run: Path) -> None:
    """Importing PyTorch's compiler takes as long as importing the rest of it."""
    code = (
        "import sys, sample; sample.main(sys.argv[1:]);"
        "print([name for name in ('torch._dynamo', 'sympy', 'wandb', 'matplotlib') if name in sys.modules])"
    )
    options = (f"--out_dir={char_run}", "--prompt=Line 1", "--max_new_tokens=3", "--device=cpu")
    result = subprocess.run(
        [sys.executable, "-c", code, *options], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.stdout.endswith("[]\n"), result.stdout + result.stderr
