"""Files that appear whole or not at all."""

import contextlib
import os
import shutil
import tempfile
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
    flush_folder(path.parent)


def flush_folder(path: Path) -> None:
    """Have the names in a folder last through a power failure, where its file system can."""
    if os.name == "posix":
        with contextlib.suppress(OSError):
            folder = os.open(path, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


@contextlib.contextmanager
def staging_folder(out_dir: Path, prefix: str) -> Iterator[Path]:
    """A folder inside the final one, gone when the block ends in whatever way; so is a final one that stayed empty.

    Raises:
        OSError: it cannot be made.
    """
    made = not out_dir.exists()
    out_dir.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=out_dir))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if made and not any(out_dir.iterdir()):
            out_dir.rmdir()
