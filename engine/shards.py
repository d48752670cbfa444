"""Checkpoints in shards: every process writes its own share of the tensors into a folder beside the checkpoint's file.

last.pt           what a checkpoint holds, where tensors have a shape and a type but no numbers
last.shards-a/    their numbers, as torch.distributed.checkpoint writes them; in turn with last.shards-b/

The file is written last and in one moment, so that it always names a folder that is whole.
"""

import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from data.files import flush_folder
from engine.distributed import is_first, means_lost, told_by_first, wait_for_all
from engine.sharding import is_shared

# All that a folder's own description is made of; a pickle may otherwise ask for any function to be called.
HARMLESS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float64", "float32", "bfloat16", "float16", "int64", "bool"},
}  # fmt: skip


def mapped(content: Any, function: Callable[[str, Tensor], Any], name: str = "") -> Any:
    """Content of dictionaries and lists, each tensor replaced by what a function makes of its name and itself."""
    if isinstance(content, Tensor):
        return function(name, content)
    if isinstance(content, dict):
        return {key: mapped(value, function, f"{name}.{key}") for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [mapped(value, function, f"{name}.{index}") for index, value in enumerate(content)]
    return content


def tensors_of(content: Any) -> dict[str, Tensor]:
    """Every tensor of a content under its name, which says where it is."""
    tensors: dict[str, Tensor] = {}
    mapped(content, lambda name, tensor: tensors.setdefault(name, tensor))
    return tensors


def are_shared(content: Any) -> bool:
    """Whether a content has tensors that are shared out over the processes."""
    return any(map(is_shared, tensors_of(content).values()))


def folder_of(path: Path, content: dict[str, Any]) -> Path | None:
    """Where the numbers of a checkpoint are, or None where they are in its file.

    Raises:
        ValueError: it names something else than a folder of its own.
    """
    name = content.get("shards")
    if name is None:
        return None
    if not isinstance(name, str) or name not in [folder.name for folder in possible_folders(path)]:
        raise ValueError(f"its shards are said to be in {name!r}")
    return path.with_name(name)


def possible_folders(path: Path) -> list[Path]:
    """Those that the shards of a checkpoint take turns in."""
    return [path.with_name(f"{path.stem}.shards-{letter}") for letter in "ab"]


def write_shards(path: Path, content: dict[str, Any], in_use: Path | None) -> dict[str, Any]:
    """Write the numbers of all tensors, each process its own share; every process must come here.

    Args:
        path: of the checkpoint that is to hold the content.
        content: with shared tensors.
        in_use: the folder that the present checkpoint needs, which stays; the first process knows.

    Returns:
        The content without numbers, to be written to `path`.

    Raises:
        OSError, RuntimeError: the disk does not take them; then no process has written any that stay.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    free = [folder for folder in possible_folders(path) if folder != in_use]
    unused = [folder for folder in free if not folder.exists()]  # of a damaged checkpoint it is not known
    folder = path.with_name(told_by_first((unused or free)[0].name))
    if is_first():
        shutil.rmtree(folder, ignore_errors=True)
    wait_for_all()
    try:
        save(tensors_of(content), storage_writer=FileSystemWriter(folder, sync_files=True))
    except CheckpointException as error:
        if is_first():
            shutil.rmtree(folder, ignore_errors=True)
        raise next(iter(error.failures.values()))[0] from None
    flush_folder(folder)
    names = mapped(content, lambda _, tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    return {**names, "shards": folder.name}


def read_shards(folder: Path, tensors: dict[str, Tensor], *, alone: bool) -> None:
    """Read numbers into tensors, which may be shared out otherwise than those that were written.

    Args:
        folder: that `write_shards` filled.
        tensors: by the names of `tensors_of`; they are overwritten.
        alone: this process reads whole tensors by itself; otherwise every process must come here.

    Raises:
        ValueError: the folder is missing, damaged, or holds other tensors.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        reader = _reader(folder)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(tensors, storage_reader=reader, no_dist=alone)
    except CheckpointException as error:
        raise ValueError(f"{folder.name}: {next(iter(error.failures.values()))[0]}") from None
    except Exception as error:  # readers have many ways to fail, all of them meaning this
        if means_lost(error):
            raise
        raise ValueError(f"{folder.name}: {error}") from None


def refuse_unfounded(path: Path, content: dict[str, Any]) -> None:
    """Check that tensors without numbers have some in shards, and no more of them than there are.

    Raises:
        ValueError: there are none, or less than what the file speaks of.
    """
    missing = [tensor for tensor in tensors_of(content).values() if tensor.is_meta]
    folder, size = folder_of(path, content), sum(tensor.numel() * tensor.itemsize for tensor in missing)
    if folder is None and missing:
        raise ValueError("it names no shards for them")
    if folder is not None and size > sum(file.stat().st_size for file in folder.glob("*.distcp")):
        raise ValueError(f"{folder.name} is missing, or holds less than the {size:,} bytes of its tensors")


def with_numbers(path: Path, content: dict[str, Any], *, weights_alone: bool) -> dict[str, Any]:
    """A checkpoint with the numbers of its tensors, whole, in this process.

    Args:
        path: of its file.
        content: of it, without numbers.
        weights_alone: leave the optimizer's state without numbers, which takes two thirds of the memory.

    Raises:
        ValueError: the shards are damaged.
    """
    folder = folder_of(path, content)
    if folder is None:
        return content
    wanted = {"model": content["model"]} if weights_alone else content
    made: dict[str, Tensor] = {}

    def place(name: str, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            made[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return made.get(name, tensor)

    numbers = mapped(wanted, place)
    read_shards(folder, made, alone=True)
    return {name: value for name, value in {**content, **numbers}.items() if weights_alone or name != "shards"}


def remove_unused_shards(path: Path, in_use: Path | None) -> None:
    """Remove the folders of a checkpoint but the one that it names."""
    for folder in possible_folders(path):
        if folder != in_use:
            shutil.rmtree(folder, ignore_errors=True)


# In Python, as the one in C takes gigabytes for a large number in the wrong place.
class _HarmlessUnpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """What a description is made of, and nothing else."""
        if module.startswith("pathlib"):
            return lambda *parts: "/".join(parts)  # where it was written
        if name not in HARMLESS.get(module, ()):
            raise pickle.UnpicklingError(f"its description asks for {module}.{name}")
        return super().find_class(module, name)

    def load_build(self) -> None:
        """Fill in a part of the description; a class or function would be changed for the whole program."""
        part = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(part, type) or not is_dataclass(part):
            raise pickle.UnpicklingError("its description changes what is not its own")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


def _reader(folder: Path) -> Any:
    """torch.distributed.checkpoint's reader of a folder, which reads its description without running code from it."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    with (folder / ".metadata").open("rb") as file:
        metadata = _HarmlessUnpickler(file).load()
    for part in metadata.storage_data.values():
        if not re.fullmatch(r"[\w-]+\.distcp", part.relative_path):
            raise ValueError(f"its description names {part.relative_path!r}")
    described = {(index.fqn, index.offset) for index in metadata.storage_data}
    for name, tensor in metadata.state_dict_metadata.items():
        places = {(name, chunk.offsets) for chunk in tensor.chunks}
        if not places <= described or sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise ValueError(f"its description of {name.strip('.')} is not of a whole tensor")

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            """What was read above."""
            return metadata

    return Reader(folder)
