"""What a user sees when something cannot be done: one or two lines and exit status 2, never a traceback."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class UserError(Exception):
    """Something that the user can put right; its text names the thing, what was expected and what to do."""


def reason_of(error: BaseException) -> str:
    """The first line of what an error says, for use inside a message of ours."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def guarded(main: Callable[[list[str]], None], argv: list[str]) -> int:
    """Run a script's main and give its exit status.

    0 done, 2 something the user can put right (said in a line on standard error), 130 interrupted, 141 the
    reader of our output went away.
    """
    try:
        main(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
    except UserError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit says nothing
        return 141
    except OSError as error:
        return _complain(f"{error.filename or 'input or output'}: {error.strerror or reason_of(error)}")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _complain("out of memory: use a smaller --batch_size, --block_size or model, or free some memory")
    return 0


def _complain(message: str) -> int:
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    return 2


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on whatever device."""
    said = str(error).lower()
    words = ("out of memory", "not enough memory", "allocate memory")  # CUDA, Windows, Linux
    return isinstance(error, MemoryError) or any(word in said for word in words)


def run_command(main: Callable[[list[str]], None]) -> NoReturn:
    """Run a script's main with the command line and exit as `guarded` says; SIGTERM cleans up and exits 143."""
    if sys.getfilesystemencoding() == "ascii":
        # An ASCII locale (LC_ALL=C) says nothing about files, arguments and terminal: they are UTF-8 all the same.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it may have been closed
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a character that it lacks becomes "?"
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(guarded(main, sys.argv[1:]))
