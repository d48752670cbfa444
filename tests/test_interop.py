"""GPT-2 in Hugging Face's format, in and out, held to transformers itself; nothing is downloaded."""

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

import interop.gpt2
from data.tokenizer_files import letters_of, merges_of, to_huggingface
from data.tokenizers import END_OF_TEXT, BPETokenizer, train_bpe
from engine.checkpoint import load_checkpoint, model_from_checkpoint, tokenizer_from_checkpoint
from interop.gpt2 import config_from_gpt2, config_to_gpt2, state_from_gpt2, state_to_gpt2
from model import GPT, GPTConfig
from tests.conftest import REPOSITORY, TEXT, TINY, Outcome, assert_clean_error, call, run_sample, run_train

transformers.logging.set_verbosity_error()
KOREAN = "한글도 있고 emoji 👩‍👩‍👧 and\r\n\r CRs"


def run_interop(*argv: str) -> Outcome:
    return call(interop.gpt2.main, *argv)


@pytest.fixture(scope="module")
def tokenizer() -> BPETokenizer:
    return train_bpe([TEXT, KOREAN], 300)


def theirs(tokenizer: BPETokenizer, **changes: Any) -> transformers.GPT2LMHeadModel:
    """A random GPT-2 whose weights, biases and norms are all far from where they begin."""
    torch.manual_seed(1)
    shape = {"vocab_size": tokenizer.vocab_size, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def saved(model: Any, tokenizer: BPETokenizer, folder: Path) -> Path:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(to_huggingface(tokenizer)), encoding="utf-8")
    return folder


def loaded(run: Path) -> GPT:
    return model_from_checkpoint(load_checkpoint(run / "best.pt"), run / "best.pt").eval()


def assert_same_logits(ours: GPT, model: Any) -> None:
    ids = torch.randint(0, ours.config.vocab_size, (3, ours.config.block_size))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_function": "gelu"},
        {"tie_word_embeddings": False},
        {"n_head": 1, "n_layer": 1},
        {"n_inner": 128},
    ],
    ids=str,
)
def test_X02_an_imported_model_gives_the_same_logits(
    changes: dict[str, Any], tokenizer: BPETokenizer, here: Path
) -> None:
    model = theirs(tokenizer, **changes)
    outcome = run_interop("import", str(saved(model, tokenizer, here / "hf")), "--out_dir=run")
    assert outcome.status == 0, outcome.stderr
    assert_same_logits(loaded(here / "run"), model)


def test_X02_export_of_an_import_is_the_model_itself(tokenizer: BPETokenizer, here: Path) -> None:
    model = theirs(tokenizer)
    saved(model, tokenizer, here / "hf")
    assert run_interop("import", "hf", "--out_dir=run").status == 0
    assert run_interop("export", "run", "--out_dir=out").status == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(here / "out")
    for (name, before), (other, after) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other and torch.equal(before, after), name


def test_X02_every_weight_has_its_place_also_where_matrices_are_square() -> None:
    """Weights that are all different numbers, there and back, without a file."""
    config = GPTConfig(block_size=8, vocab_size=10, n_layer=2, n_head=2, n_embd=8, norm_placement="pre")
    model = GPT(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + 1000.0 * number)
    back = state_from_gpt2(state_to_gpt2(model), config)
    names = {name for name in model.state_dict() if not name.endswith(".scale")}
    assert back.keys() == names
    assert all(torch.equal(back[name], model.state_dict()[name]) for name in names)
    square = state_to_gpt2(model)["transformer.h.0.attn.c_proj.weight"]
    assert torch.equal(square, model.blocks[0].attention.output.weight.T) and not torch.equal(square, square.T)


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_the_older_file_and_names_without_prefix_are_read_too(
    kind: str, prefix: str, tokenizer: BPETokenizer, here: Path
) -> None:
    model = theirs(tokenizer)
    folder = saved(model, tokenizer, here / "hf")
    state = {prefix + name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
    state.pop(f"{prefix}lm_head.weight")
    state[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 24, 24, dtype=torch.bool)  # older files keep the mask
    (folder / "model.safetensors").unlink()
    if kind == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        safetensors.torch.save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors")
    assert run_interop("import", "hf", "--out_dir=run").status == 0
    assert_same_logits(loaded(here / "run"), model)


def test_code_in_an_older_file_is_not_run(tokenizer: BPETokenizer, here: Path) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (here / "ran",))

    folder = saved(theirs(tokenizer), tokenizer, here / "hf")
    (folder / "model.safetensors").unlink()
    torch.save({"wte.weight": Malicious()}, folder / "pytorch_model.bin")
    assert_clean_error(run_interop("import", "hf", "--out_dir=run"), "pytorch_model.bin: cannot be read")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious()))
    assert_clean_error(run_interop("import", "hf", "--out_dir=run"), "pytorch_model.bin: cannot be read")
    assert not (here / "ran").exists() and not (here / "run").exists()


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize("bias", ["true", "false"])
def test_X01_a_trained_run_is_loaded_by_transformers_with_equal_logits_and_tokens(
    kind: str, bias: str, here: Path
) -> None:
    (here / "text.txt").write_text(TEXT + KOREAN, encoding="utf-8", newline="")
    options = (f"--tokenizer={kind}", "--vocab_size=280", f"--bias={bias}", "--norm_placement=pre", "--val_fraction=0")
    trained = run_train(
        "--text=text.txt", "--out_dir=run", *TINY, *options, "--max_iters=3", "--vocab_padding_multiple=64"
    )
    assert trained.status == 0, trained.stderr
    outcome = run_interop("export", "run", "--out_dir=out")
    assert outcome.status == 0, outcome.stderr
    content = load_checkpoint(here / "run/last.pt")
    assert_same_logits(
        model_from_checkpoint(content, here).eval(), transformers.AutoModelForCausalLM.from_pretrained("out")
    )
    ours, other = tokenizer_from_checkpoint(content, here), transformers.AutoTokenizer.from_pretrained("out")
    for text in (TEXT, KOREAN.replace("\r\n", "\n"), "fox  jumps\n\n\n  over"):
        ids = ours.encode(text).tolist()
        assert other(text)["input_ids"] == ids and other.decode(ids) == text
    assert other.eos_token_id == ours.end_of_text and other.eos_token == END_OF_TEXT
    assert other.model_max_length == 32


def test_X03_a_tied_head_is_stored_once_and_tied_again_when_loaded(tokenizer: BPETokenizer, here: Path) -> None:
    saved(theirs(tokenizer), tokenizer, here / "hf")
    assert run_interop("import", "hf", "--out_dir=run").status == 0
    assert run_interop("export", "run", "--out_dir=out").status == 0
    assert "lm_head.weight" not in safetensors.torch.load_file(here / "out/model.safetensors")
    again = transformers.AutoModelForCausalLM.from_pretrained("out")
    assert again.lm_head.weight.data_ptr() == again.transformer.wte.weight.data_ptr()
    model = loaded(here / "run")
    assert model.head_weight.data_ptr() == model.token_embedding.weight.data_ptr()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"position": "rotary"}, "position = rotary"), ({"norm_placement": "post"}, "norm_placement = post")],
)
def test_X01_what_the_format_cannot_hold_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"{words}: GPT-2's format has only"):
        config_to_gpt2(GPTConfig(**{"norm_placement": "pre", **change}), 0)


def test_X01_a_run_that_cannot_be_exported_leaves_no_folder(char_run: Path, here: Path) -> None:
    assert_clean_error(run_interop("export", str(char_run), "--out_dir=out"), "norm_placement = post")
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "model_type = 'llama'"),
        ({"n_inner": 100}, "n_inner = 100"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
        ({"activation_function": "relu"}, "activation_function = 'relu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"n_head": 5}, "not divisible by n_head = 5"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_name(
    change: dict[str, Any], words: str, tokenizer: BPETokenizer
) -> None:
    content = {**transformers.GPT2Config(n_embd=32, n_head=4).to_dict(), **change}
    with pytest.raises(ValueError, match=words):
        config_from_gpt2(content)


def break_weights(folder: Path, change: Any) -> None:
    state = safetensors.torch.load_file(folder / "model.safetensors")
    change(state)
    safetensors.torch.save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("transformer.h.1.mlp.c_fc.bias"), "h.1.mlp.c_fc.bias"),
        (lambda s: s.update({"transformer.ln_f.weight": torch.ones(31)}), "final_norm.weight"),
        (lambda s: s.update({"transformer.h.0.mlp.c_fc.weight": torch.ones(128, 32)}), "feed_forward.expand"),
    ],
)
def test_X02_weights_that_do_not_fit_are_named(change: Any, words: str, tokenizer: BPETokenizer, here: Path) -> None:
    break_weights(saved(theirs(tokenizer), tokenizer, here / "hf"), change)
    assert_clean_error(run_interop("import", "hf", "--out_dir=run"), "cannot be read as a GPT-2", words)
    assert not (here / "run").exists()


def test_the_four_sizes_of_gpt2_have_their_known_numbers_of_parameters() -> None:
    known = {
        "": (12, 12, 768, 124_439_808),
        "medium": (24, 16, 1024, 354_823_168),
        "large": (36, 20, 1280, 774_030_080),
        "xl": (48, 25, 1600, 1_557_611_200),
    }
    for n_layer, n_head, n_embd, parameters in known.values():
        content = transformers.GPT2Config(n_layer=n_layer, n_head=n_head, n_embd=n_embd).to_dict()
        assert config_from_gpt2(content).parameter_count == parameters


def test_gpt2s_own_vocabulary_files_are_read(tokenizer: BPETokenizer, here: Path) -> None:
    folder = saved(theirs(tokenizer), tokenizer, here / "hf")
    (folder / "tokenizer.json").unlink()
    vocab = {letters_of(token): i for i, token in enumerate(tokenizer.ranks) if token} | {
        END_OF_TEXT: tokenizer.end_of_text
    }
    merges = [f"{letters_of(a)} {letters_of(b)}" for a, b in merges_of(tokenizer.ranks)]
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    assert run_interop("import", "hf", "--out_dir=run").status == 0
    ours = tokenizer_from_checkpoint(load_checkpoint(here / "run/best.pt"), here)
    their_tokenizer = transformers.GPT2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))
    for text in (TEXT, KOREAN, "in 12345 days   it's\t\n"):
        assert ours.encode(text).tolist() == their_tokenizer(text)["input_ids"]


def test_a_name_is_found_in_the_hubs_cache_without_a_network(tokenizer: BPETokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "hub/models--some--model/snapshots/0123456789"
    model = theirs(tokenizer)
    saved(model, tokenizer, folder)
    (tmp_path / "hub/models--some--model/refs").mkdir()
    (tmp_path / "hub/models--some--model/refs/main").write_text("0123456789")
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    for name, status in (("some/model", 0), ("some/other", 2)):
        command = [sys.executable, "-m", "interop.gpt2", "import", name, f"--out_dir={tmp_path / 'run'}"]
        if status:
            command[-1] += "2"
        result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == status and "Traceback" not in result.stderr, result.stderr
    assert "nor to be downloaded" in result.stderr and not (tmp_path / "run2").exists()
    assert_same_logits(loaded(tmp_path / "run"), model)


def test_an_export_that_fails_leaves_nothing(
    tokenizer: BPETokenizer, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(theirs(tokenizer), tokenizer, here / "hf")
    assert run_interop("import", "hf", "--out_dir=run").status == 0

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    assert_clean_error(
        run_interop("export", "run", "--out_dir=deep/out"), "deep/out: cannot be written", "nothing was kept"
    )
    assert not (here / "deep/out").exists()
    monkeypatch.undo()


def test_the_command_tells_how_it_is_used() -> None:
    outcome = run_interop("--help")
    assert outcome.status == 0 and "python -m interop.gpt2 export" in outcome.stdout


@pytest.fixture
def imported(tokenizer: BPETokenizer, here: Path) -> Iterator[Path]:
    saved(theirs(tokenizer), tokenizer, here / "hf")
    assert run_interop("import", "hf", "--out_dir=gpt2").status == 0
    with contextlib.suppress(FileNotFoundError):
        yield here / "gpt2"


def test_an_imported_model_starts_an_empty_prompt_after_end_of_text(imported: Path, tokenizer: BPETokenizer) -> None:
    outcome = run_sample("--out_dir=gpt2", "--max_new_tokens=1", "--logprobs=1")
    line = json.loads(outcome.stdout)
    with torch.no_grad():
        expected = loaded(imported)(torch.tensor([[tokenizer.end_of_text]]))[0][0, 0].log_softmax(dim=-1)
    assert line["logprob"] == pytest.approx(expected[line["id"]].item(), abs=1e-4)


def test_models_of_different_tokenizers_can_begin_on_the_same_text(imported: Path, here: Path) -> None:
    (here / "text.txt").write_text(TEXT, encoding="utf-8")
    other = train_bpe([TEXT], 290)
    saved(theirs(other), other, here / "other")
    assert run_interop("import", "other", "--out_dir=other_run").status == 0
    for name in ("gpt2", "other_run"):
        options = (f"--init_from={name}", "--text=text.txt", f"--out_dir=from_{name}", "--max_iters=0", "--device=cpu")
        outcome = run_train(*options, "--report=false", "--sample_tokens=0")
        assert outcome.status == 0, outcome.stderr


def test_an_imported_model_can_be_sampled_from(imported: Path) -> None:
    outcome = run_sample("--out_dir=gpt2", "--prompt=Line", "--max_new_tokens=5", "--temperature=0")
    assert outcome.status == 0 and outcome.stdout.startswith("Line"), outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["import", "nowhere/at/all", "--out_dir=x"], "no such folder"),
        (["import", "hf", "--out_dir=gpt2"], "gpt2: already holds a best.pt"),
        (["export", "gpt2", "--out_dir=hf"], "hf: is not empty"),
        (["export", "nowhere", "--out_dir=x"], "nowhere: no such run directory"),
        (["convert"], "expected import or export"),
        (["import", "hf"], "out_dir: is missing"),
        (["import", "empty", "--out_dir=x"], "empty: has no tokenizer.json"),
    ],
)
def test_what_cannot_be_done_is_a_clean_error(arguments: list[str], words: str, imported: Path, here: Path) -> None:
    (here / "empty").mkdir()
    assert_clean_error(run_interop(*arguments), words)
    assert not (here / "x").exists()


# --- training on ----------------------------------------------------------------------------------------------------


def weights(path: str) -> dict[str, torch.Tensor]:
    return dict(load_checkpoint(Path(path), lazily=False)["model"])


def test_training_goes_on_from_an_imported_model_with_its_tokenizer_and_is_resumed(imported: Path, here: Path) -> None:
    (here / "text.txt").write_text(TEXT, encoding="utf-8")
    common = (
        "--batch_size=2",
        "--device=cpu",
        "--dtype=float32",
        "--report=false",
        "--warmup_iters=0",
        "--sample_tokens=0",
    )
    first = run_train("--init_from=gpt2", "--text=text.txt", "--out_dir=run", "--max_iters=0", *common)
    assert first.status == 0, first.stderr
    assert all(torch.equal(weights("run/last.pt")[name], value) for name, value in weights("gpt2/best.pt").items())
    assert load_checkpoint(Path("run/last.pt"))["tokenizer"] == load_checkpoint(Path("gpt2/best.pt"))["tokenizer"]
    options = ("--init_from=gpt2", "--text=text.txt", "--block_size=16", "--dropout=0.1", *common)
    for name, parts in (("whole", ("4",)), ("parts", ("2", "4"))):
        for number, updates in enumerate(parts):
            resumed = ("--resume",) if number else options
            outcome = run_train(f"--out_dir={name}", f"--max_iters={updates}", "--lr_decay_iters=4", *resumed)
            assert outcome.status == 0, outcome.stderr
    whole, parts_weights = weights("whole/last.pt"), weights("parts/last.pt")
    assert all(torch.equal(value, parts_weights[name]) for name, value in whole.items())
    assert whole["position_embedding.weight"].shape == (16, 32)
    assert not torch.equal(whole["token_embedding.weight"], weights("gpt2/best.pt")["token_embedding.weight"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--n_layer=1"], "n_layer = 1: the run in run was made with n_layer = 2"),
        (["--init_from=other"], "init_from = other: the run in run was made with init_from = gpt2"),
    ],
)
def test_resuming_keeps_the_model_that_the_run_began_with(
    arguments: list[str], words: str, imported: Path, here: Path
) -> None:
    (here / "text.txt").write_text(TEXT, encoding="utf-8")
    options = ("--max_iters=0", "--device=cpu", "--report=false", "--sample_tokens=0")
    assert run_train("--init_from=gpt2", "--text=text.txt", "--out_dir=run", *options).status == 0
    assert_clean_error(run_train("--out_dir=run", "--resume", "--max_iters=2", *arguments), words)
    shutil.rmtree(imported)
    gone_on = run_train("--out_dir=run", "--resume", "--max_iters=1", "--batch_size=1")
    assert gone_on.status == 0, "the run holds all that it needs"


def test_a_folder_of_another_tool_is_told_apart_from_a_run(imported: Path, here: Path) -> None:
    assert_clean_error(
        run_train("--init_from=hf", "--out_dir=run"), "hf: is another tool's model", "interop.gpt2 import"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--init_from=gpt2", "--text=text.txt", "--n_layer=3"],
            "the model in gpt2/best.pt has n_layer = 2; leave",
        ),
        (
            ["--init_from=gpt2", "--text=text.txt", "--tokenizer=char"],
            "gpt2/best.pt has tokenizer = bpe",
        ),
        (["--init_from=gpt2", "--text=text.txt", "--block_size=99"], "block_size = 99: the model in gpt2/best.pt has"),
        (["--init_from=nowhere", "--text=text.txt"], "nowhere: no such run directory or checkpoint"),
    ],
)
def test_a_beginning_that_contradicts_the_model_is_refused(
    arguments: list[str], words: str, imported: Path, here: Path
) -> None:
    (here / "text.txt").write_text(TEXT, encoding="utf-8")
    assert_clean_error(run_train(*arguments, "--out_dir=run"), words)
    assert not (here / "run").exists()


def test_data_of_another_tokenizer_is_refused_for_an_imported_model(imported: Path, char_data: Path) -> None:
    outcome = run_train("--init_from=gpt2", f"--data_dir={char_data}", "--out_dir=run")
    assert_clean_error(outcome, "was prepared with another tokenizer (char)", "use --text")


def test_a_preset_beside_an_imported_model_gives_all_but_architecture_and_tokenizer(imported: Path, here: Path) -> None:
    (here / "text.txt").write_text(TEXT, encoding="utf-8")
    (here / "preset.toml").write_text(
        'n_layer = 9\ntokenizer = "char"\nmax_iters = 1\nbatch_size = 3\nreport = false\n'
    )
    outcome = run_train("preset.toml", "--init_from=gpt2", "--text=text.txt", "--out_dir=run", "--device=cpu")
    assert outcome.status == 0 and "1 updates of 72 tokens" in outcome.stdout, outcome.stderr
    assert "2 layers, 4 heads, width 32, context 24" in outcome.stdout
    again = run_train("run/settings.toml", "--out_dir=again", "--device=cpu")
    assert again.status == 0, again.stderr
    assert all(torch.equal(value, weights("again/last.pt")[name]) for name, value in weights("run/last.pt").items())
