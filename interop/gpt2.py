"""GPT-2 in Hugging Face's format: read it into a run directory, and write a run as one.

python -m interop.gpt2 import gpt2 --out_dir=runs/gpt2            a name, from the cache or the hub
python -m interop.gpt2 import path/to/folder --out_dir=runs/mine
python -m interop.gpt2 export runs/quick --out_dir=exported       for AutoModelForCausalLM and AutoTokenizer

No code from any file is run: weights are read from safetensors, or from the older pytorch_model.bin by PyTorch's
loader for plain tensors.
"""

import contextlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from config.command_line import parse
from config.errors import UserError, reason_of, run_command
from config.schema import InteropSettings
from data.dataset import Metadata, token_dtype
from data.files import staging_folder
from data.patterns import GPT2_PATTERN
from data.tokenizer_files import from_vocab_and_merges, to_huggingface, tokenizer_from_file
from data.tokenizers import END_OF_TEXT, Tokenizer
from engine.checkpoint import (
    NoInitialWeights,
    load_checkpoint,
    model_content,
    model_from_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    tokenizer_from_checkpoint,
)
from model import GPT, GPTConfig

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
FILES = ("config.json", *WEIGHTS, "tokenizer.json", "vocab.json", "merges.txt")
ACTIVATIONS: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu",
}  # fmt: skip
ACTIVATION_NAMES = {"gelu_tanh": "gelu_new", "gelu": "gelu"}

# Parts of a block: our name, theirs, and whether theirs is (in, out) as GPT-2's Conv1D keeps its matrices.
BLOCK_PARTS = (
    ("attention_add_norm.norm", "ln_1", False),
    ("attention.output", "attn.c_proj", True),
    ("feed_forward_add_norm.norm", "ln_2", False),
    ("feed_forward.expand", "mlp.c_fc", True),
    ("feed_forward.output", "mlp.c_proj", True),
)


def config_from_gpt2(content: dict[str, Any]) -> GPTConfig:
    """The architecture that a config.json of GPT-2 describes.

    Raises:
        ValueError: it is of another family, or has a part that this model has not.
    """
    if content.get("model_type") != "gpt2":
        raise ValueError(f"model_type = {content.get('model_type')!r}: expected 'gpt2'")
    width = content["n_embd"]
    required = {
        "n_inner": (None, 4 * width),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "activation_function": tuple(ACTIVATIONS),
    }
    for name, allowed in required.items():
        if content.get(name, allowed[0]) not in allowed:
            raise ValueError(f"{name} = {content[name]!r}: expected {' or '.join(map(repr, allowed))}")
    return GPTConfig(
        block_size=content.get("n_positions") or content["n_ctx"],
        vocab_size=content["vocab_size"],
        n_layer=content["n_layer"],
        n_head=content["n_head"],
        n_embd=width,
        norm_placement="pre",
        activation=ACTIVATIONS[content.get("activation_function", "gelu_new")],
        tied_head=content.get("tie_word_embeddings", True),
    )


def config_to_gpt2(config: GPTConfig, end_of_text: int) -> dict[str, Any]:
    """The config.json of a model.

    Raises:
        ValueError: GPT-2's format has no place for a part of it.
    """
    for name, value in (("position", "learned"), ("norm_placement", "pre")):
        if getattr(config, name) != value:
            raise ValueError(f"{name} = {getattr(config, name)}: GPT-2's format has only {value}")
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": config.vocab_size,
        "n_positions": config.block_size, "n_ctx": config.block_size, "n_embd": config.n_embd,
        "n_layer": config.n_layer, "n_head": config.n_head, "n_inner": None,
        "activation_function": ACTIVATION_NAMES[config.activation], "layer_norm_epsilon": 1e-5,
        "resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": config.dropout,
        "scale_attn_weights": True, "tie_word_embeddings": config.tied_head,
        "bos_token_id": end_of_text, "eos_token_id": end_of_text, "torch_dtype": "float32",
    }  # fmt: skip


def state_from_gpt2(theirs: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Our names and shapes for GPT-2's weights.

    Its matrices are (in, out), ours (out, in); its query, key and value are one matrix, ours three. Which one a matrix
    is goes by its name, as a square one looks the same either way.

    Raises:
        KeyError: a weight is missing.
        ValueError: a weight has another shape.
    """
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    ours = {"token_embedding.weight": theirs["wte.weight"], "position_embedding.weight": theirs["wpe.weight"]}
    for layer in range(config.n_layer):
        for kind in ("weight", "bias"):
            for name, their_name, transposed in BLOCK_PARTS:
                tensor = theirs[f"h.{layer}.{their_name}.{kind}"]
                ours[f"blocks.{layer}.{name}.{kind}"] = tensor.T if transposed and kind == "weight" else tensor
            joined = theirs[f"h.{layer}.attn.c_attn.{kind}"]  # (C, 3C) or (3C,)
            for name, part in zip(("query", "key", "value"), joined.chunk(3, dim=-1), strict=True):
                ours[f"blocks.{layer}.attention.{name}.{kind}"] = part.T if kind == "weight" else part
    for kind in ("weight", "bias"):
        ours[f"final_norm.{kind}"] = theirs[f"ln_f.{kind}"]
    if not config.tied_head:
        ours["head.weight"] = theirs["lm_head.weight"]
    return {name: tensor.float().contiguous() for name, tensor in ours.items()}


def state_to_gpt2(model: GPT) -> dict[str, Tensor]:
    """GPT-2's names and shapes for a model's weights; biases that it has not are zeros, one copy of a tied head."""
    config, ours = model.config, model.state_dict()

    def part(name: str, kind: str, size: int) -> Tensor:
        return ours[f"{name}.{kind}"] if f"{name}.{kind}" in ours else torch.zeros(size)

    theirs = {"wte.weight": ours["token_embedding.weight"][: config.vocab_size]}
    theirs["wpe.weight"] = ours["position_embedding.weight"]
    C = config.n_embd
    for layer in range(config.n_layer):
        for kind in ("weight", "bias"):
            for name, their_name, transposed in BLOCK_PARTS:
                tensor = part(f"blocks.{layer}.{name}", kind, 4 * C if name.endswith("expand") else C)
                theirs[f"h.{layer}.{their_name}.{kind}"] = tensor.T if transposed and kind == "weight" else tensor
            names = [f"blocks.{layer}.attention.{name}" for name in ("query", "key", "value")]
            parts = [part(name, kind, C) for name in names]
            theirs[f"h.{layer}.attn.c_attn.{kind}"] = torch.cat([p.T if kind == "weight" else p for p in parts], dim=-1)
    for kind in ("weight", "bias"):
        theirs[f"ln_f.{kind}"] = part("final_norm", kind, C)
    theirs = {f"transformer.{name}": tensor.contiguous() for name, tensor in theirs.items()}
    if not config.tied_head:
        theirs["lm_head.weight"] = ours["head.weight"][: config.vocab_size].contiguous()
    return theirs


def find_folder(source: str) -> Path:
    """The folder of a model: a path, or a name of the hub's, from its cache or, where there is a network, from there.

    Raises:
        UserError: it is neither.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(source, allow_patterns=[name for name in FILES if name != WEIGHTS[1]]))
        if not (folder / WEIGHTS[0]).is_file():  # an older model, which has the other file alone
            folder = Path(snapshot_download(source, allow_patterns=list(FILES)))
        return folder
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{source}: no such folder, and as a name of Hugging Face's hub neither in its cache nor to be downloaded "
            f"({reason_of(error)}); name a folder with config.json and {' or '.join(WEIGHTS)}"
        ) from None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's weights.

    Raises:
        UserError: there are none, or they cannot be read.
    """
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise UserError(f"{folder}: has neither {' nor '.join(WEIGHTS)}")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    except Exception as error:  # both readers have many ways to fail, all of them meaning this
        raise UserError(f"{path}: cannot be read, it is damaged or another kind of file ({reason_of(error)})") from None


def read_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer: tokenizer.json, or vocab.json with merges.txt.

    Raises:
        UserError: there is none, or it is of another kind.
    """
    if (folder / "tokenizer.json").is_file():
        return tokenizer_from_file(folder / "tokenizer.json")
    try:
        vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
        merges = [line for line in lines if line and not line.startswith("#version")]
        return from_vocab_and_merges("gpt2", GPT2_PATTERN, vocab, merges, {END_OF_TEXT: vocab[END_OF_TEXT]})
    except OSError as error:
        raise UserError(f"{folder}: has no tokenizer.json, and no {Path(str(error.filename)).name}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: vocab.json and merges.txt do not serve: {reason_of(error)}") from None


def import_model(source: str, out_dir: Path) -> None:
    """Read a GPT-2 and make a run directory of it, to sample from or to begin with (train.py --init_from).

    Raises:
        UserError: it cannot be had or is no GPT-2, or the directory holds a run already.
    """
    for name in ("best.pt", "last.pt"):
        if (out_dir / name).exists():
            raise UserError(f"{out_dir}: already holds a {name}; name another --out_dir")
    folder = find_folder(source)
    tokenizer = read_tokenizer(folder)
    try:
        config = config_from_gpt2(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        if tokenizer.vocab_size != config.vocab_size:
            raise ValueError(f"the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}")
        with NoInitialWeights():
            model = GPT(config)
        model.load_state_dict(model.state_dict() | state_from_gpt2(read_weights(folder), config))
    except KeyError as error:
        raise UserError(f"{folder}: cannot be read as a GPT-2: there is no {error.args[0]}") from None
    except (TypeError, AttributeError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"{folder}: cannot be read as a GPT-2: {' '.join(str(error).split())[:300]}") from None
    out_dir.mkdir(parents=True, exist_ok=True)
    content = {**model_content(model, tokenizer), "step": 0, "data": {**_unknown_data(source, tokenizer), "folder": ""}}
    save_checkpoint(out_dir / "best.pt", content)
    print(f"{source}: {model.parameter_count():,} parameters, written to {out_dir / 'best.pt'}")
    place = shlex.quote(str(out_dir))
    print(f"sample from it with: python sample.py --out_dir={place}")
    print(f"train on with: python train.py --init_from={place} --text=my_text.txt --learning_rate=3e-5")


def _unknown_data(source: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a checkpoint says of its data where nobody knows it: several documents, so that end-of-text begins one."""
    return Metadata(
        source=source, source_sha256="", documents=2, characters=0, bytes=0, encoding="utf-8", parse_special=False,
        tokenizer=tokenizer.name, tokenizer_sha256=tokenizer.sha256(), requested_vocab_size=tokenizer.vocab_size,
        vocab_size=tokenizer.vocab_size, dtype=token_dtype(tokenizer.vocab_size), val_fraction=0.0, train_tokens=0,
        val_tokens=0, train_sha256="", val_sha256="",
    ).model_dump()  # fmt: skip


def export_model(source: str, out_dir: Path) -> None:
    """Write a run's model as a GPT-2 that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Biases that the model has not become zeros.

    Raises:
        UserError: there is no such run, GPT-2's format has no place for its architecture, or the folder is not empty.
    """
    if out_dir.exists() and any(out_dir.iterdir()):
        raise UserError(f"{out_dir}: is not empty; name another --out_dir")
    path = newest_checkpoint(Path(source))
    checkpoint = load_checkpoint(path)
    tokenizer = tokenizer_from_checkpoint(checkpoint, path)
    model = model_from_checkpoint(checkpoint, path)
    try:
        config = config_to_gpt2(model.config, tokenizer.end_of_text)
        files = {"config.json": config, "tokenizer.json": to_huggingface(tokenizer)}
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    files["tokenizer_config.json"] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.config.block_size,
        "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    with _appearing_whole(out_dir) as folder:
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        safetensors.torch.save_file(state_to_gpt2(model), folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{path}: written to {out_dir}; load it with AutoModelForCausalLM.from_pretrained({str(out_dir)!r})")


@contextlib.contextmanager
def _appearing_whole(out_dir: Path) -> Iterator[Path]:
    """A folder to write into that becomes `out_dir`, missing or empty so far, when all is written.

    Raises:
        UserError: it cannot be written; nothing is left.
    """
    try:
        with staging_folder(out_dir, ".exporting-") as staging:
            yield staging
            for path in sorted(staging.iterdir()):
                path.replace(out_dir / path.name)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{out_dir}: cannot be written ({reason_of(error)}); nothing was kept") from None


def main(argv: list[str]) -> None:
    """Import or export, as the first word says."""
    direction, rest = (argv[0] if argv else ""), argv[1:]
    if direction in ("-h", "--help"):
        print(__doc__)
        return
    if direction not in ("import", "export"):
        raise UserError(f"{direction or 'no word'}: expected import or export, then what, then --out_dir=")
    settings = parse(InteropSettings, rest)
    (import_model if direction == "import" else export_model)(settings.source, Path(settings.out_dir))


if __name__ == "__main__":
    run_command(main)
