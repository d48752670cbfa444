"""Files of one JSON object a line, each with the step that it belongs to: a run's numbers, and its samples."""

import json
from pathlib import Path
from typing import Any

from config.errors import UserError
from data.files import written_whole


def read_step_log(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole, in order; none where there is no file."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue  # a line that was cut off when the machine stopped
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


class StepLog:
    """Such a file, written in the order of the steps; a resumed run goes on where its checkpoint was.

    Args:
        path: the file.
        last_step: lines of later steps are dropped, since those steps will be done again.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        kept = [line for line in read_step_log(path) if line["step"] <= last_step]
        with written_whole(path) as file:
            file.write("".join(json.dumps(line) + "\n" for line in kept).encode("utf-8"))
        self.file = path.open("a", encoding="utf-8")

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
