"""loss.png and report.html of a run: its curves, samples, settings, speed and hardware, and how to go on."""

import shlex
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.schema import TrainSettings
from data.files import written_whole
from engine.step_log import read_step_log
from views.pages import picture_address, write_page
from views.plots import Lines, column, run_picture


def write_run_page(out_dir: Path, settings: TrainSettings, facts: Mapping[str, str]) -> None:
    """Draw loss.png and write report.html, from what the run has written down so far.

    Args:
        out_dir: the run directory.
        settings: of the run.
        facts: what is trained on what, by what it is called.

    Raises:
        OSError: a file cannot be read or written.
    """
    lines = read_step_log(out_dir / "metrics.jsonl")
    step = max((line["step"] for line in lines), default=0)
    picture = run_picture(lines, f"{out_dir.name}, {step:,} updates")
    with written_whole(out_dir / "loss.png") as file:
        file.write(picture)
    place = shlex.quote(str(out_dir))
    write_page(
        out_dir / "report.html",
        "run_page.html",
        name=out_dir.name,
        step=step,
        updates=settings.max_iters,
        figures=key_figures(lines),
        facts=facts,
        picture=picture_address(picture),
        samples=read_step_log(out_dir / "samples.jsonl"),
        commands=[f"python train.py --out_dir={place} --resume", f"python sample.py --out_dir={place}"],
        settings=_described(settings),
    )


def key_figures(lines: Lines) -> dict[str, str]:
    """The numbers that a run is judged by, as far as it has them, by what they are."""
    figures = {}
    best = min((line for line in lines if "val_loss" in line), key=lambda line: line["val_loss"], default=None)
    if best is not None:
        figures["best validation loss, nats per token"] = f"{best['val_loss']:.4f}"
        figures["bits per byte there"] = f"{best['val_bits_per_byte']:.4f}"
    losses, speeds = column(lines, "loss")[1], column(lines, "tokens_per_second")[1]
    if losses:
        figures["last training loss"] = f"{losses[-1]:.4f}"
    if speeds:
        figures["tokens a second, median"] = f"{statistics.median(speeds):,.0f}"
    return figures


def _described(settings: TrainSettings) -> list[dict[str, Any]]:
    """Every setting with its meaning, and whether it was chosen."""
    return [
        {
            "name": name,
            "value": "none" if (value := getattr(settings, name)) == "" else str(value),
            "meaning": field.description,
            "changed": value != field.default and name != "out_dir",
        }
        for name, field in TrainSettings.model_fields.items()
    ]
