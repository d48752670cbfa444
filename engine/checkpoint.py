"""Checkpoints: one file of tensors and plain types that appears whole or not at all.

Loading runs no code from the file (`weights_only`), and tensors are mapped, so that whoever wants the weights
does not pay for the optimizer state beside them. Of a model that several processes share, the numbers lie in shards
beside the file (engine/shards.py), and are read from there as if they were in it.
"""

import contextlib
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.overrides import TorchFunctionMode

from config.errors import UserError, reason_of
from data.dataset import Metadata
from data.files import written_whole
from data.tokenizers import Tokenizer, tokenizer_from_json
from engine.distributed import any_of_all, is_first, means_lost
from engine.shards import (
    are_shared,
    folder_of,
    refuse_unfounded,
    remove_unused_shards,
    with_numbers,
    write_shards,
)
from model import GPT, GPTConfig

FORMAT_VERSION = 2
SMALL_DIFFERENCE = 1 << 20  # numbers that cost no memory worth a word
FOREIGN_PREFIXES = ("_orig_mod.", "module.")  # torch.compile's and DistributedDataParallel's
REQUIRED = {"format_version": int, "model": dict, "model_config": dict, "tokenizer": str, "step": int, "data": dict}


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint beside its target, flush it to the disk, then rename it into place.

    Of tensors that processes share, each process writes its own part, so that every one must come here; otherwise the
    one that comes writes all.

    Args:
        path: the target; an earlier checkpoint stays whole until the new one is.
        content: tensors and plain types, as `model_content` and the caller's own state.

    Raises:
        UserError: the disk is full or the folder cannot be written; the earlier checkpoint is intact.
    """
    shared, problem = are_shared(content), ""
    try:
        if shared:
            in_use = None
            with contextlib.suppress(UserError):  # there is none, or a damaged one that is replaced
                in_use = folder_of(path, load_checkpoint(path, numbers=False))
            content = write_shards(path, content, in_use)
        if not shared or is_first():
            with written_whole(path) as file:
                torch.save({"format_version": FORMAT_VERSION, **content}, file)
            remove_unused_shards(path, folder_of(path, content))
    except (OSError, RuntimeError) as error:  # a failing write reaches us as either
        if means_lost(error):
            raise
        problem = reason_of(error)
    if any_of_all(bool(problem)) if shared else problem:  # the others may have had none
        raise UserError(f"{path}: cannot be written ({problem}); an earlier checkpoint there is intact")


def clear_unused_shards(path: Path) -> None:
    """Remove shards that a process left which was killed while it saved; only for who uses the folder alone.

    Where the checkpoint is damaged, or has been moved away from them, all stay.
    """
    with contextlib.suppress(UserError):
        remove_unused_shards(path, folder_of(path, load_checkpoint(path, numbers=False)))


def model_content(model: GPT, tokenizer: Tokenizer) -> dict[str, Any]:
    """The part of a checkpoint that sampling needs."""
    return {"model": model.state_dict(), "model_config": asdict(model.config), "tokenizer": tokenizer.to_json()}


def newest_checkpoint(place: Path) -> Path:
    """A checkpoint file itself, or the best (else the last) of a run directory.

    Raises:
        UserError: there is no such file or directory.
    """
    if place.is_dir():
        best = place / "best.pt"
        if (place / "config.json").exists() and not best.exists() and not (place / "last.pt").exists():
            raise UserError(f"{place}: is another tool's model; read it first: python -m interop.gpt2 import {place}")
        return best if best.exists() else place / "last.pt"
    if not place.is_file():
        raise UserError(f"{place}: no such run directory or checkpoint; train one with train.py, or name another")
    return place


def load_checkpoint(path: Path, *, lazily: bool = True, numbers: bool = True) -> dict[str, Any]:
    """Read a checkpoint to the CPU.

    Args:
        path: the file.
        lazily: map it, and read each tensor when it is used; of shards, read the weights alone.
        numbers: False leaves what lies in shards on the meta device.

    Raises:
        UserError: no such file, not a checkpoint, cut off, or of a later format; shards are missing or damaged.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; expected a file that train.py saved")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
    except Exception as error:  # the archive reader has many ways to fail, all of them meaning this
        raise UserError(
            f"{path}: cannot be read as a checkpoint, it is damaged or another kind of file ({reason_of(error)})"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, expected a checkpoint of train.py")
    for name, kind in REQUIRED.items():
        if not isinstance(content.get(name), kind):
            raise UserError(f"{path}: has no {name} ({kind.__name__}), expected a checkpoint of train.py")
    if not 1 <= content["format_version"] <= FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {content['format_version']}, this program reads 1 to {FORMAT_VERSION}; use a "
            f"newer one"
        )
    if content["format_version"] == 1:  # from before there was a choice
        for values in (content["model_config"], content.get("settings")):
            if isinstance(values, dict):
                values["activation"] = "gelu_tanh"
        content["skipped"] = 0
    try:
        Metadata.model_validate({name: value for name, value in content["data"].items() if name != "folder"})
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(f"{path}: its record of the data does not serve ({place})") from None
    if content["step"] < 0 or not isinstance(content["data"].get("folder"), str):
        raise UserError(f"{path}: its step or data folder does not serve; expected a checkpoint of train.py")
    try:
        refuse_unfounded(path, content)
        return with_numbers(path, content, weights_alone=lazily) if numbers else content
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: its numbers cannot be read, {reason_of(error)}; a folder with its shards belongs beside it"
        ) from None


class NoInitialWeights(TorchFunctionMode):
    """Modules made inside have memory but no initial weights: no time goes into numbers that are overwritten."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass over torch.nn.init, and do everything else."""
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def model_from_checkpoint(content: dict[str, Any], path: Path, **changes: Any) -> GPT:
    """The model of a checkpoint, on the CPU in float32.

    Args:
        content: from `load_checkpoint`; without its numbers, the model has none that mean anything.
        path: for messages.
        changes: config fields to change, such as attention_impl or dropout.

    Raises:
        UserError: the architecture is impossible, or the weights do not belong to it.
    """
    known = {field.name for field in fields(GPTConfig)}
    try:
        config = GPTConfig(**{**{key: content["model_config"][key] for key in known}, **changes})
        state = without_prefixes(content["model"])
        refuse_implausible(state, config)
        with NoInitialWeights():
            model = GPT(config)
        if "shards" not in content or not all(tensor.is_meta for tensor in state.values()):  # whose numbers come later
            model.load_state_dict(state)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(
            f"{path}: its weights and its architecture do not fit together: {' '.join(lines)[:400]}"
        ) from None
    return model


def refuse_implausible(state: dict[str, Any], config: GPTConfig) -> None:
    """Check, before time and memory go into a model, that its architecture is no larger than what the file holds.

    Small differences pass, as loading then says which names are missing.

    Raises:
        ValueError: it is larger, or the state holds something else than plain tensors of floating-point numbers.
    """
    numbers = 0
    for name, tensor in state.items():
        plain = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.layout == torch.strided
        if not plain or not tensor.is_contiguous():  # one that is not may claim more numbers than the file holds
            raise ValueError(f"{name} is not a plain tensor of floating-point numbers")
        numbers += tensor.numel() if tensor.dim() else 0  # constants such as the scale have no dimension
    layers = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    if config.n_layer > 2 * layers or config.parameter_count > 2 * numbers + SMALL_DIFFERENCE:
        raise ValueError(
            f"{numbers:,} numbers in {layers} layers, but an architecture of {config.n_layer} layers, width "
            f"{config.n_embd} and {config.vocab_size} ids has {config.parameter_count:,}"
        )


def without_prefixes(state: dict[str, Any]) -> dict[str, Any]:
    """State under the model's own names, whatever wrapper it was saved from."""
    for prefix in FOREIGN_PREFIXES:
        if state and all(name.startswith(prefix) for name in state):
            return without_prefixes({name.removeprefix(prefix): value for name, value in state.items()})
    return state


def tokenizer_from_checkpoint(content: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        UserError: it cannot be read, or has another number of ids than the model.
    """
    try:
        tokenizer = tokenizer_from_json(content["tokenizer"])
        if tokenizer.vocab_size != content["model_config"].get("vocab_size"):
            raise ValueError(
                f"{tokenizer.vocab_size} ids, but the model has {content['model_config'].get('vocab_size')}"
            )
    except ValueError as error:
        raise UserError(f"{path}: its tokenizer does not serve: {error}") from None
    return tokenizer
