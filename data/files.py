"""Files that appear whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".{name}.{process}.tmp"


def clear_unfinished(folder: Path) -> None:
    """Remove what `written_whole` left in a folder when its process was killed; only for who uses it alone."""
    for path in folder.glob(TEMPORARY.format(name="*", process="*")):
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Write beside the target, flush to the disk, then rename into place; an error leaves the target as it was.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(TEMPORARY.format(name=path.name, process=os.getpid()))
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":
        # So that the rename lasts through a power failure; some network file systems cannot.
        with contextlib.suppress(OSError):
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
