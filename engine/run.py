"""A run directory: what is in it, how a run starts in it or goes on, and what it records there.

settings.toml    every setting of the run; feed it back in as a preset
metrics.jsonl    one line a logged step or validation
last.pt          everything needed to go on exactly, and to sample
best.pt          the weights with the best validation loss, to sample
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from config.command_line import checked, to_toml
from config.errors import UserError
from config.schema import TrainSettings
from data.dataset import PreparedData, read_metadata
from data.preparation import prepare_if_needed
from engine.checkpoint import load_checkpoint, model_content, save_checkpoint
from engine.evaluation import Evaluation
from engine.optimizer import Optimizer
from model import GPT

# What the saved weights and optimizer state are made for; the rest may change when a run goes on.
FIXED = (
    "block_size", "n_layer", "n_head", "n_embd", "bias", "norm_placement", "position", "tied_head",
    "vocab_padding_multiple", "optimizer",
)  # fmt: skip


def place_of_run(given: dict[str, Any], preset: str | None) -> tuple[Path, bool]:
    """The run directory, as said or named after the preset, text or data; and whether the run goes on there.

    Raises:
        UserError: one of these settings is wrong; the others may only be right beside those of the saved run.
    """
    names = {"out_dir", "resume", "text", "data_dir"}
    settings = checked(TrainSettings, {name: value for name, value in given.items() if name in names})
    name = Path(preset or settings.text or settings.data_dir or "stdlib").stem or "run"
    return Path(settings.out_dir or Path("runs") / name), settings.resume


def settings_to_resume(saved: dict[str, Any], given: dict[str, Any], path: Path) -> TrainSettings:
    """The settings of a saved run, with the changes that the user gives now.

    Raises:
        UserError: a change that the weights cannot follow, with both values.
    """
    changed = checked(TrainSettings, {**saved, **given})
    for name in FIXED:
        if getattr(changed, name) != saved[name]:
            raise UserError(
                f"{name} = {getattr(changed, name)}: the run in {path} was made with {name} = {saved[name]}, and its "
                f"weights fit nothing else; leave --{name} out, or start a new run with another --out_dir"
            )
    return changed


def open_data(settings: TrainSettings, saved: dict[str, Any] | None) -> PreparedData:
    """The tokens to train on, prepared now if they must be; on resuming, those that the run began with.

    Args:
        settings: of the run.
        saved: the checkpoint's record of its data, when resuming.

    Raises:
        UserError: the data cannot be had, or differs from that of the saved run.
    """
    if saved is not None and (settings.text, settings.data_dir) == (saved["text"], saved["data_dir"]):
        folder = Path(saved["folder"])  # still right when the text has been edited since
        if _holds(folder, saved):
            return PreparedData(folder)
    if settings.data_dir:
        data = PreparedData(Path(settings.data_dir))
    else:
        data = PreparedData(prepare_if_needed(settings.text or "stdlib", settings))
    if saved is not None:
        refuse_other_data(data, saved)
    return data


def _holds(folder: Path, saved: dict[str, Any]) -> bool:
    try:
        return read_metadata(folder).train_sha256 == saved["train_sha256"]
    except UserError:
        return False


def refuse_other_data(data: PreparedData, saved: dict[str, Any]) -> None:
    """A run goes on only with its own tokenizer and its own tokens.

    Raises:
        UserError: naming both.
    """
    meta = data.metadata
    advice = "prepare it as before, or start a new run with another --out_dir"
    if meta.tokenizer_sha256 != saved["tokenizer_sha256"]:
        raise UserError(
            f"{data.folder}: its tokenizer is {meta.tokenizer} with {meta.vocab_size} ids "
            f"({meta.tokenizer_sha256[:8]}), the run was trained with {saved['tokenizer']} with "
            f"{saved['vocab_size']} ids ({saved['tokenizer_sha256'][:8]}); {advice}"
        )
    for name in ("train_sha256", "val_sha256"):
        if getattr(meta, name) != saved[name]:
            raise UserError(
                f"{data.folder}: its tokens have {name} {getattr(meta, name)[:8]}, those of the run "
                f"{saved[name][:8]}; {advice}"
            )


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: updates done.
        best_loss: the best validation loss, infinite before the first.
        evaluations_without_better: since then.
    """

    step: int = 0
    best_loss: float = math.inf
    evaluations_without_better: int = 0


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
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            (out_dir / "settings.toml").write_text(to_toml(settings), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{out_dir}: cannot be written ({error.strerror}); name another --out_dir") from None

    @property
    def patience_is_over(self) -> bool:
        """Whether validation has not improved for as long as the settings allow."""
        return 0 < self.settings.patience <= self.progress.evaluations_without_better

    def save(self) -> None:
        """Write last.pt."""
        save_checkpoint(self.out_dir / "last.pt", self._content() | self._state())

    def save_after(self, evaluation: Evaluation | None) -> None:
        """Write last.pt, and best.pt when the evaluation (None: no validation) is the best so far."""
        if evaluation is not None:
            if evaluation.loss < self.progress.best_loss:
                self.progress.best_loss = evaluation.loss
                self.progress.evaluations_without_better = 0
                save_checkpoint(self.out_dir / "best.pt", self._content())
            else:
                self.progress.evaluations_without_better += 1
        self.save()

    def _content(self) -> dict[str, Any]:
        return {
            **model_content(self.model, self.data.tokenizer),
            "step": self.progress.step,
            "best_loss": self.progress.best_loss,
            "settings": self.settings.model_dump(),
            "data": {
                **self.data.metadata.model_dump(),
                "folder": str(self.data.folder.resolve()),
                "text": self.settings.text,
                "data_dir": self.settings.data_dir,
            },
        }

    def _state(self) -> dict[str, Any]:
        cuda = self.model.device.type == "cuda"
        return {
            "progress": asdict(self.progress),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random_state": {
                "cpu": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if cuda else [],
            },
            "wandb_id": self.wandb_id,
        }

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Take back optimizer, progress and random state; the model has its weights already.

        Raises:
            UserError: the state is not one of this run's.
        """
        try:
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.scaler.load_state_dict(checkpoint["scaler"])
            self.progress = Progress(**checkpoint["progress"])
            self.wandb_id = checkpoint["wandb_id"]
            torch.set_rng_state(checkpoint["random_state"]["cpu"])
            if self.model.device.type == "cuda" and checkpoint["random_state"]["cuda"]:
                torch.cuda.set_rng_state_all(checkpoint["random_state"]["cuda"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{self.out_dir / 'last.pt'}: its training state does not serve: {error!r}"[:300]) from None


def checkpoint_to_resume(out_dir: Path, resume: bool) -> dict[str, Any] | None:
    """The checkpoint to go on from, or None for a new run.

    Raises:
        UserError: there is a run where a new one should start, or none where one should go on.
    """
    path = out_dir / "last.pt"
    if not resume:
        if path.exists():
            raise UserError(f"{out_dir}: already holds a run; add --resume to go on with it, or name another --out_dir")
        return None
    checkpoint = load_checkpoint(path, lazily=False)
    missing = [name for name in ("settings", "progress", "optimizer", "random_state") if name not in checkpoint]
    if missing:
        raise UserError(f"{path}: has no {missing[0]}, so it can be sampled from but not gone on with; use a last.pt")
    return checkpoint
