"""What a run leaves to look at: the progress bar, metrics.jsonl, and Weights & Biases when asked for.

Knows nothing of models; it is given numbers.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from config.errors import UserError, reason_of
from config.schema import TrainSettings
from data.files import written_whole

WANDB_INIT_SECONDS = 20  # an online run without a network gives up after this


class MetricsFile:
    """One JSON object a line, in the order of the steps; a resumed run goes on where its checkpoint was.

    Args:
        path: the file.
        last_step: lines of later steps are dropped, since those steps will be done again.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        kept = [line for line in self._lines() if line["step"] <= last_step]
        with written_whole(path) as file:
            file.write("".join(json.dumps(line) + "\n" for line in kept).encode("utf-8"))
        self.file = path.open("a", encoding="utf-8")

    def _lines(self) -> list[dict[str, Any]]:
        lines = []
        for text in self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.exists() else []:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue  # a line that was cut off when the machine stopped
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
        return lines

    def write(self, values: dict[str, Any]) -> None:
        """Append one line and hand it to the operating system at once.

        Raises:
            UserError: the disk does not take it.
        """
        try:
            self.file.write(json.dumps(values) + "\n")
            self.file.flush()
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror}); free some space, then --resume"
            ) from None


class Tracker:
    """Where the numbers of a run go.

    Args:
        out_dir: the run directory.
        settings: of the run.
        first_step: updates already done.
        wandb_id: of the wandb run to go on with, if any.

    Raises:
        UserError: wandb was asked for and cannot be had.
    """

    def __init__(self, out_dir: Path, settings: TrainSettings, first_step: int, wandb_id: str | None) -> None:
        self.metrics = MetricsFile(out_dir / "metrics.jsonl", first_step)
        self.wandb_run = _start_wandb(out_dir, settings, wandb_id) if settings.wandb != "disabled" else None
        self.wandb_failed = False
        interval = 0.1 if sys.stderr.isatty() else 10.0  # a log file need not hold every frame
        self.bar = tqdm(
            total=settings.max_iters, initial=first_step, unit="step", dynamic_ncols=True, mininterval=interval
        )
        self.restart_clock(first_step)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *error: object) -> None:
        """End the bar, the file and the wandb run."""
        self.bar.close()
        self.metrics.file.close()
        self.tell_wandb(lambda run: run.finish())

    def restart_clock(self, step: int) -> None:
        """Measure speed from here on, so that what was done meanwhile does not count."""
        self.clock = (step, time.perf_counter())

    def updates_per_second(self, step: int) -> float:
        """Speed since the last time this was asked or the clock restarted."""
        earlier, since = self.clock
        self.restart_clock(step)
        return (step - earlier) / max(1e-9, self.clock[1] - since)

    @property
    def wandb_id(self) -> str | None:
        """The id under which a resumed run goes on in wandb."""
        return None if self.wandb_run is None else self.wandb_run.id

    def advance(self) -> None:
        """One update is done."""
        self.bar.update()

    def record(self, step: int, **values: float | None) -> None:
        """Write one line of numbers."""
        self.metrics.write({"step": step, **values})
        self.tell_wandb(lambda run: run.log(values, step=step))

    def tell_wandb(self, what: Callable[[Any], object]) -> None:
        """Do something with the wandb run; if it fails, say so once and go on without: metrics.jsonl has it all."""
        if self.wandb_run is None or self.wandb_failed:
            return
        try:
            what(self.wandb_run)
        except Exception as error:  # wandb's own errors, and those of its service and of the network
            self.wandb_failed = True
            self.say(f"wandb: failed and is left out from now on ({reason_of(error)}); metrics.jsonl goes on")

    def show(self, loss: float, tokens_per_second: float, utilisation: float | None) -> None:
        """Put the latest numbers on the bar."""
        share = "" if utilisation is None else f", {utilisation:.1%} of peak"
        self.bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s{share}")

    def say(self, line: str) -> None:
        """Print a line above the bar; a reader that went away does not stop the training."""
        with contextlib.suppress(BrokenPipeError):
            self.bar.write(line)


def _start_wandb(out_dir: Path, settings: TrainSettings, wandb_id: str | None) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError("wandb: the package is not installed; pip install wandb, or use --wandb=disabled") from None
    try:
        return wandb.init(
            project=settings.wandb_project,
            name=out_dir.name,
            dir=str(out_dir),
            config=settings.model_dump(),
            mode=settings.wandb,
            id=wandb_id,
            resume="allow",
            settings=wandb.Settings(init_timeout=WANDB_INIT_SECONDS),
        )
    except Exception as error:  # wandb's own errors, and those of the network under it
        advice = "use --wandb=offline or disabled"
        raise UserError(f"wandb = {settings.wandb}: cannot start ({reason_of(error)}); {advice}") from None
