"""A run directory: what is in it, how a run starts in it or goes on, and what it records there.

settings.toml    every setting of the run; feed it back in as a preset
metrics.jsonl    one line a logged step or validation
samples.jsonl    what the model wrote at each validation
loss.png         the curves
report.html      the curves, samples, settings and hardware on one page
last.pt          everything needed to go on exactly, and to sample
best.pt          the weights with the best validation loss, to sample
*.shards-*/      the numbers of either, where several processes share the model (engine/shards.py)
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from config.command_line import Given, checked, overlaid, plain_values, read_given, to_toml
from config.errors import UserError, reason_of
from config.preparation import PreparationFields
from config.schema import ARCHITECTURE, TrainSettings
from data.dataset import PreparedData, refuse_other_data
from data.files import clear_unfinished, written_whole
from data.preparation import prepare_if_needed, safe_name
from data.tokenizers import Tokenizer
from engine.checkpoint import (
    clear_unused_shards,
    load_checkpoint,
    model_content,
    newest_checkpoint,
    save_checkpoint,
    tokenizer_from_checkpoint,
)
from engine.distributed import any_of_all, is_first, world_size
from engine.evaluation import Evaluation
from engine.optimizer import Optimizer
from engine.sharding import own_share
from engine.shards import folder_of, read_shards, tensors_of
from model import GPT, GPTConfig

LOCK = ".lock"

# What the saved weights, optimizer state and tokens are made for; the rest may change when a run goes on.
FIXED = ("init_from", "block_size", *ARCHITECTURE, "optimizer", *PreparationFields.model_fields)


def place_of_run(given: Given) -> tuple[Path, TrainSettings]:
    """The run directory, and the settings that say whether the run goes on there, or is only rehearsed.

    The directory is as said, else in runs/ and named after the text or data on the command line, the preset,
    or the text.

    Raises:
        UserError: one of these settings is wrong; the others may only be right beside those of the saved run.
    """
    names = {"out_dir", "resume", "dry_run", "text", "data_dir"}
    settings = checked(TrainSettings, {name: value for name, value in given.values.items() if name in names})
    own = given.command_line.get("text") or given.command_line.get("data_dir")
    name = safe_name(own or given.preset_name or settings.text or settings.data_dir or "stdlib")
    return Path(settings.out_dir or Path("runs") / name), settings


@contextlib.contextmanager
def sole_use(out_dir: Path) -> Iterator[None]:
    """The run directory for this process alone, made when missing, and gone again when nothing was put into it.

    The system lets go of the lock when a process ends in whatever way.

    Raises:
        UserError: another process trains in it, or it cannot be written.
    """
    missing = [folder for folder in (out_dir, *out_dir.parents) if not folder.exists()]
    lock = FileLock(out_dir / LOCK)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"{out_dir}: another process is training in it; wait until it has ended, or name another --out_dir"
        ) from None
    except (OSError, NotImplementedError) as error:
        raise UserError(f"{out_dir}: cannot be written ({reason_of(error)}); name another --out_dir") from None
    try:
        clear_unfinished(out_dir)
        for name in ("last.pt", "best.pt"):
            clear_unused_shards(out_dir / name)
        yield
    finally:
        with contextlib.suppress(OSError):  # what else lies in these folders stays, and they with it
            if not (out_dir / "last.pt").exists():
                (out_dir / LOCK).unlink(missing_ok=True)
            for folder in missing:
                folder.rmdir()
        lock.release()


def refuse_occupied(out_dir: Path) -> None:
    """Check that a new run replaces nothing.

    Raises:
        UserError: there is a run, or a file of a name that a run writes.
    """
    if (out_dir / "last.pt").exists():
        raise UserError(f"{out_dir}: already holds a run; add --resume to go on with it, or name another --out_dir")
    for name in ("best.pt", "metrics.jsonl", "samples.jsonl", "loss.png", "report.html", "settings.toml"):
        if (out_dir / name).exists() and not _began_here(out_dir):
            raise UserError(f"{out_dir}: holds a {name} that this run would replace; name another --out_dir")


def checkpoint_to_resume(out_dir: Path) -> dict[str, Any]:
    """The checkpoint to go on from; what lies in shards has no numbers yet.

    Raises:
        UserError: there is none, or one that can only be sampled from.
    """
    path = out_dir / "last.pt"
    checkpoint = load_checkpoint(path, lazily=False, numbers=False)
    if "optimizer" not in checkpoint or not isinstance(checkpoint.get("settings"), dict):
        raise UserError(
            f"{path}: has no optimizer state, so it can be sampled from but not gone on with; use a last.pt"
        )
    return checkpoint


def _began_here(out_dir: Path) -> bool:
    """Whether all there is in a directory is a run that ended before it saved anything."""
    try:
        read_given(TrainSettings, [str(out_dir / "settings.toml")], takes_preset=True)
    except UserError:
        return False
    return not (out_dir / "best.pt").exists()


def settings_to_resume(saved: dict[str, Any], given: Given, out_dir: Path) -> TrainSettings:
    """The settings of a saved run, with the changes that the command line makes now; a preset changes nothing.

    Raises:
        UserError: a change that the weights or tokens cannot follow, with both values.
    """
    settings = checked(TrainSettings, overlaid(TrainSettings, saved, given.command_line))
    # Data that is prepared already is compared by its hashes, in `open_data`.
    by_hash = set(PreparationFields.model_fields) if settings.data_dir else set()
    for name in FIXED:
        if name in saved and name not in by_hash and getattr(settings, name) != saved[name]:
            made_with = "none" if saved[name] == "" else saved[name]
            raise UserError(
                f"{name} = {getattr(settings, name)}: the run in {out_dir} was made with {name} = {made_with}; "
                f"leave --{name} out, or start a new run with another --out_dir"
            )
    return settings


def is_to_be_shared(settings: TrainSettings) -> bool:
    """Whether each of several processes is to hold a part of the model."""
    return settings.parallel == "fsdp" and world_size() > 1


@dataclass(frozen=True)
class Beginning:
    """How a run starts or goes on.

    Attributes:
        settings: of the run.
        checkpoint: to go on from; None for a new run.
        origin: the checkpoint whose weights and architecture are taken: the same one, or that of `init_from`; None for
            weights from the seed.
        origin_path: where it is.
        tokenizer: of the model that the run began with, where it began with one.
    """

    settings: TrainSettings
    checkpoint: dict[str, Any] | None
    origin: dict[str, Any] | None
    origin_path: Path
    tokenizer: Tokenizer | None


def how_to_begin(given: Given, out_dir: Path, resume: bool) -> Beginning:
    """Read what a run needs before there is data and a model.

    Args:
        given: the command line and its preset.
        out_dir: the run directory.
        resume: go on with the run that is there.

    Raises:
        UserError: settings are wrong or contradict what is there.
    """
    checkpoint, path = checkpoint_to_resume(out_dir) if resume else None, out_dir / "last.pt"
    if checkpoint is None:
        settings = checked(TrainSettings, given.values)
    else:
        settings = settings_to_resume(checkpoint["settings"], given, out_dir)
    settings = settings.model_copy(update={"resume": False, "out_dir": str(out_dir)})
    if checkpoint is not None and "shards" in checkpoint and not is_to_be_shared(settings):
        checkpoint = load_checkpoint(path, lazily=False)
    if not settings.init_from:
        return Beginning(settings, checkpoint, checkpoint, path, None)
    origin = checkpoint
    if origin is None:
        path = newest_checkpoint(Path(settings.init_from))
        origin = load_checkpoint(path)
    tokenizer = tokenizer_from_checkpoint(origin, path)
    if checkpoint is None:
        settings = with_model_of(settings, given, origin, tokenizer, path)
    return Beginning(settings, checkpoint, origin, path, tokenizer)


def with_model_of(
    settings: TrainSettings, given: Given, origin: dict[str, Any], tokenizer: Tokenizer, path: Path
) -> TrainSettings:
    """Settings with the architecture and the tokenizer of the model that a run begins with; a preset's give way.

    Args:
        settings: that name it in `init_from`.
        given: where they are from; a context that is given may be shorter than the model's.
        origin: the checkpoint of the model.
        tokenizer: its tokenizer.
        path: for messages.

    Raises:
        UserError: the command line asks for something else than the model has.
    """
    try:
        config = GPTConfig(**{field.name: origin["model_config"][field.name] for field in fields(GPTConfig)})
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its architecture does not serve: {error!r}") from None
    model = {name: getattr(config, name) for name in ARCHITECTURE}
    model["tokenizer"] = tokenizer.name
    for name, value in model.items():
        if name in given.command_line and getattr(settings, name) != value:
            raise UserError(
                f"{name} = {getattr(settings, name)}: the model in {path} has {name} = {value}; leave --{name} out"
            )
    longest = config.block_size
    if "block_size" in given.command_line and settings.block_size > longest:
        raise UserError(
            f"block_size = {settings.block_size}: the model in {path} has a context of {longest}; give at most that"
        )
    length = min(settings.block_size, longest) if "block_size" in given.values else longest
    return settings.model_copy(update={**model, "block_size": length})


def open_data(
    settings: TrainSettings, checkpoint: dict[str, Any] | None, tokenizer: Tokenizer | None = None
) -> PreparedData:
    """The tokens to train on, prepared now if they must be; on resuming, those that the run began with.

    Args:
        settings: of the run.
        checkpoint: when resuming.
        tokenizer: that of the model which the run began with, if any.

    Raises:
        UserError: the data cannot be had, or differs from that of the saved run.
    """
    if checkpoint is not None:
        began_with = checkpoint["settings"]
        if (settings.text, settings.data_dir) == (began_with.get("text", ""), began_with.get("data_dir", "")):
            try:  # still right when the text has been edited since
                data = PreparedData(Path(checkpoint["data"]["folder"]))
                refuse_other_data(data, checkpoint["data"])
                return data
            except UserError:
                pass  # gone or replaced; the text may still give the same tokens
    if settings.data_dir:
        data = PreparedData(Path(settings.data_dir))
    else:
        data = prepare_if_needed(settings.text or "stdlib", settings, tokenizer)
    if tokenizer is not None and data.metadata.tokenizer_sha256 != tokenizer.sha256():
        raise UserError(
            f"{data.folder}: was prepared with another tokenizer ({data.metadata.tokenizer}) than that of the model in "
            f"{settings.init_from}; use --text, so that it is prepared with the right one"
        )
    if checkpoint is not None:
        refuse_other_data(data, checkpoint["data"])
    return data


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: updates done.
        best_loss: the best validation loss, infinite before the first.
        evaluations_without_better: since then.
        skipped: updates left out because their loss or gradient was not finite.
    """

    step: int = 0
    best_loss: float = math.inf
    evaluations_without_better: int = 0
    skipped: int = 0


class Run:
    """A run in its directory: it saves itself, and knows what it has reached.

    Args:
        out_dir: the directory, made when missing.
        settings, data, model, optimizer, scaler: of the run.
    """

    def __init__(
        self,
        out_dir: Path,
        settings: TrainSettings,
        data: PreparedData,
        model: GPT,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
    ) -> None:
        self.out_dir, self.settings, self.data = out_dir, settings, data
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.progress = Progress()
        self.wandb_id: str | None = None
        self.peak_flops: float | None = None  # of the device, where it is known

    @property
    def is_shared(self) -> bool:
        """Whether each process holds a part of the model."""
        return is_to_be_shared(self.settings)

    @property
    def patience_is_over(self) -> bool:
        """Whether validation has not improved for as long as the settings allow."""
        return 0 < self.settings.patience <= self.progress.evaluations_without_better

    @property
    def is_finished(self) -> bool:
        """Whether there is no update left to do."""
        return self.progress.step >= self.settings.max_iters or self.patience_is_over

    def write_settings(self) -> None:
        """Write settings.toml; of several processes, the first does.

        Raises:
            UserError: it cannot be written.
        """
        if not is_first():
            return
        try:
            with written_whole(self.out_dir / "settings.toml") as file:
                file.write(to_toml(self.settings).encode("utf-8"))
        except OSError as error:
            raise UserError(f"{self.out_dir}: cannot be written ({error.strerror}); name another --out_dir") from None

    def save(self, evaluation: Evaluation | None = None) -> None:
        """Write last.pt, then best.pt when the evaluation is the best so far.

        Of several processes the first does, or all of them when they share the model. In this order, so that a run
        killed between the two can go on; it then makes up for the second.

        Raises:
            UserError: the weights are not finite (an earlier checkpoint stays), or the disk does not take them.
        """
        own = (own_share(parameter) for parameter in self.model.parameters())
        broken = not all(bool(torch.isfinite(numbers).all()) for numbers in own)
        if any_of_all(broken):
            raise self.divergence("a weight is not finite")
        progress = self.progress
        is_best = evaluation is not None and evaluation.loss < progress.best_loss
        if evaluation is not None and is_best:
            progress.best_loss, progress.evaluations_without_better = evaluation.loss, 0
        elif evaluation is not None:
            progress.evaluations_without_better += 1
        if not (is_first() or self.is_shared):
            return
        save_checkpoint(self.out_dir / "last.pt", self._content() | self._state() | {"is_best": is_best})
        if is_best:
            save_checkpoint(self.out_dir / "best.pt", self._content())

    def divergence(self, what: str) -> UserError:
        """The error to raise when a number is NaN or infinite."""
        last = self.out_dir / "last.pt"
        saved = f"{last} holds an earlier, finite state" if last.exists() else "nothing was saved yet"
        return UserError(
            f"step {self.progress.step:,}: {what}, the training has diverged; {saved}; "
            f"try a lower --learning_rate, a longer --warmup_iters or --dtype=float32"
        )

    def _content(self) -> dict[str, Any]:
        return {
            **model_content(self.model, self.data.tokenizer),
            "step": self.progress.step,
            "best_loss": self.progress.best_loss,
            "settings": plain_values(self.settings),
            "data": {**self.data.metadata.model_dump(), "folder": str(self.data.folder.resolve())},
        }

    def _state(self) -> dict[str, Any]:
        """What going on needs besides; no random state, as every draw is a function of seed and step."""
        return {
            "evaluations_without_better": self.progress.evaluations_without_better,
            "skipped": self.progress.skipped,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "wandb_id": self.wandb_id,
        }

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Take back optimizer and progress; the model has its weights already.

        Raises:
            UserError: the state is not one of this run's.
        """
        try:
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            folder = folder_of(self.out_dir / "last.pt", checkpoint)
            if folder is not None:
                read_shards(folder, tensors_of(self._content() | self._state()), alone=False)
            if checkpoint["scaler"] and self.scaler.is_enabled():
                self.scaler.load_state_dict(checkpoint["scaler"])
            self.progress = Progress(
                checkpoint["step"],
                float(checkpoint["best_loss"]),
                int(checkpoint["evaluations_without_better"]),
                int(checkpoint["skipped"]),
            )
            self.wandb_id = None if checkpoint["wandb_id"] is None else str(checkpoint["wandb_id"])
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{self.out_dir / 'last.pt'}: its training state does not serve: {error!r}"[:300]) from None
        if self.settings.dry_run:
            return
        missing = is_first() and checkpoint.get("is_best") is True and not self._best_is_saved()
        if any_of_all(missing) and (is_first() or self.is_shared):
            save_checkpoint(self.out_dir / "best.pt", self._content())

    def _best_is_saved(self) -> bool:
        """Whether best.pt holds the present weights."""
        try:
            return bool(load_checkpoint(self.out_dir / "best.pt", numbers=False)["step"] == self.progress.step)
        except UserError:  # the run was killed before it had any
            return False
