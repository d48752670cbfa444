"""Runs side by side: what differs in their settings, what came of them, and two learning curves step by step."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.command_line import parse, plain_values
from config.errors import UserError
from config.schema import TrainSettings
from engine.step_log import read_step_log

NAMES = {"out_dir", "resume"}  # say where a run is, not what it is


@dataclass(frozen=True)
class RunRecord:
    """What a run directory tells of its run.

    Attributes:
        name: the directory, as it was given.
        settings: of the run.
        lines: of its metrics.jsonl.
    """

    name: str
    settings: TrainSettings
    lines: Sequence[Mapping[str, Any]]

    def values(self, name: str) -> list[float]:
        """Every number of that name, in order."""
        return [line[name] for line in self.lines if isinstance(line.get(name), int | float)]


def read_run(folder: Path) -> RunRecord:
    """What settings.toml and metrics.jsonl of a run directory say.

    Raises:
        UserError: there is no such directory, or it is not a run's.
    """
    for name in ("settings.toml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: has no {name}; expected a run directory that train.py made")
    settings = parse(TrainSettings, [str(folder / "settings.toml")], takes_preset=True)
    lines = read_step_log(folder / "metrics.jsonl")
    if not lines:
        raise UserError(f"{folder / 'metrics.jsonl'}: holds no numbers yet; train first")
    return RunRecord(str(folder), settings, lines)


def differing_settings(runs: Sequence[RunRecord]) -> list[list[str]]:
    """A row for each setting that is not the same in all runs that have it: its name, and its value in each.

    A run on prepared data, say, has no setting of how it was prepared.
    """
    rows, settings = [], [plain_values(run.settings) for run in runs]
    for name in TrainSettings.model_fields:
        values = [own.get(name) for own in settings]
        had = [value for value in values if value is not None]
        if name not in NAMES and any(value != had[0] for value in had):
            rows.append([name, *({"": "none", None: "-"}.get(value, str(value)) for value in values)])
    return rows


def results(runs: Sequence[RunRecord]) -> list[list[str]]:
    """A row for each figure: its name, and what it is in each run."""

    def row(title: str, name: str, of: Any, style: str) -> list[str]:
        return [title, *(format(of(run.values(name)), style) if run.values(name) else "-" for run in runs)]

    return [
        row("updates", "step", max, ","),
        row("last training loss", "loss", lambda values: values[-1], ".4f"),
        row("best validation loss", "val_loss", min, ".4f"),
        row("last validation loss", "val_loss", lambda values: values[-1], ".4f"),
        row("best bits per byte", "val_bits_per_byte", min, ".4f"),
        row("tokens/s, median", "tokens_per_second", statistics.median, ",.0f"),
    ]


def learning_curves(manual: RunRecord, sdpa: RunRecord) -> dict[str, Any]:
    """Training losses of two runs with the same seed and batches, and SDPA's less manual's, at the steps of both."""
    losses = [
        {line["step"]: line["loss"] for line in run.lines if isinstance(line.get("loss"), int | float)}
        for run in (manual, sdpa)
    ]
    steps = sorted(losses[0].keys() & losses[1].keys())
    manual_losses, sdpa_losses = ([of_run[step] for step in steps] for of_run in losses)
    difference = [b - a for a, b in zip(manual_losses, sdpa_losses, strict=True)]
    return {"steps": steps, "manual": manual_losses, "sdpa": sdpa_losses, "difference": difference}
