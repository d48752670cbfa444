"""Where a run's numbers and samples go: the progress bar, metrics.jsonl, samples.jsonl, and wandb when asked for.

Knows nothing of models; it is given numbers.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from config.errors import UserError, reason_of
from config.schema import TrainSettings
from engine.step_log import StepLog, read_step_log

WANDB_INIT_SECONDS = 20  # an online run without a network gives up after this


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
        self.out_dir = out_dir
        self.metrics = StepLog(out_dir / "metrics.jsonl", first_step)
        self.samples = StepLog(out_dir / "samples.jsonl", first_step)
        self.wandb_run = _start_wandb(out_dir, settings, wandb_id) if settings.wandb != "disabled" else None
        self.failed: set[str] = set()
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
        self.samples.file.close()
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

    def record_sample(self, step: int, text: str) -> None:
        """Write down what the model wrote after so many updates."""
        self.samples.write({"step": step, "text": text})
        self.tell_wandb(lambda run: run.log({"samples": _table(read_step_log(self.samples.path))}, step=step))

    def log_picture(self, step: int) -> None:
        """Show loss.png in wandb."""
        self.tell_wandb(lambda run: run.log({"loss curve": _image(self.out_dir / "loss.png")}, step=step))

    def tell_wandb(self, what: Callable[[Any], object]) -> None:
        """Do something with the wandb run, if there is one."""
        if self.wandb_run is not None:
            self.attempt("wandb", lambda: what(self.wandb_run))

    def attempt(self, name: str, what: Callable[[], object]) -> bool:
        """Do what training can do without; once it fails, say so and leave it out: metrics.jsonl has it all.

        Returns:
            Whether it was done.
        """
        if name in self.failed:
            return False
        try:
            what()
            return True
        except Exception as error:  # of whatever library, its services, the network or the disk
            self.failed.add(name)
            self.say(f"{name}: failed and is left out from now on ({reason_of(error)}); metrics.jsonl goes on")
            return False

    def show(self, loss: float, tokens_per_second: float, utilisation: float | None) -> None:
        """Put the latest numbers on the bar."""
        share = "" if utilisation is None else f", {utilisation:.1%} of peak"
        self.bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s{share}")

    def say(self, line: str) -> None:
        """Print a line above the bar; a reader that went away does not stop the training."""
        with contextlib.suppress(BrokenPipeError):
            self.bar.write(line)


class SilentTracker(Tracker):
    """Of several processes, all but the first track nothing."""

    def __init__(self) -> None:
        self.wandb_run = None

    def __exit__(self, *error: object) -> None:
        """Nothing is to be ended."""

    def restart_clock(self, step: int) -> None:
        """There is no clock."""

    def updates_per_second(self, step: int) -> float:
        """Nobody asks."""
        return 0.0

    def advance(self) -> None:
        """There is no bar."""

    def record(self, step: int, **values: float | None) -> None:
        """The first process has the same numbers."""

    def record_sample(self, step: int, text: str) -> None:
        """The first process has the same text."""

    def show(self, loss: float, tokens_per_second: float, utilisation: float | None) -> None:
        """There is no bar."""

    def say(self, line: str) -> None:
        """The first process says it."""


def _table(samples: list[dict[str, Any]]) -> Any:
    import wandb

    return wandb.Table(columns=["step", "text"], data=[[sample["step"], str(sample.get("text"))] for sample in samples])


def _image(path: Path) -> Any:
    import wandb

    return wandb.Image(str(path))


def _start_wandb(out_dir: Path, settings: TrainSettings, wandb_id: str | None) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError("wandb: the package is not installed; pip install wandb, or use --wandb=disabled") from None
    try:
        run = wandb.init(
            project=settings.wandb_project,
            name=out_dir.name,
            dir=str(out_dir),
            config=settings.model_dump(),
            mode=settings.wandb,
            id=wandb_id,
            resume="allow",
            settings=wandb.Settings(init_timeout=WANDB_INIT_SECONDS),
        )
        run.define_metric("val_loss", summary="min")
        return run
    except Exception as error:  # wandb's own errors, and those of the network under it
        advice = "use --wandb=offline or disabled"
        raise UserError(f"wandb = {settings.wandb}: cannot start ({reason_of(error)}); {advice}") from None
