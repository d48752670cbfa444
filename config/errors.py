"""What a user sees when something cannot be done: one or two lines and exit status 2, never a traceback."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class UserError(Exception):
    """Something that the user can put right; its text names the thing, what was expected and what to do."""


def printable_streams() -> None:
    """Make sure that printing never dies, whatever the locale says about the terminal.

    An ASCII locale (LC_ALL=C) says nothing about the terminal, so text goes out as UTF-8 there; any other
    encoding is kept, and characters that it lacks become "?".
    """
    for stream in (sys.stdout, sys.stderr):
        ascii_only = stream.encoding.lower().replace("-", "") in ("ascii", "ansi_x3.41968", "646")
        stream.reconfigure(encoding="utf-8" if ascii_only else None, errors="replace")  # type: ignore[union-attr]


def run_command(main: Callable[[list[str]], None]) -> NoReturn:
    """Run a script's main with the command line, turning each way to end into its exit status.

    0 done, 2 something the user can put right, 130 interrupted, 141 the reader of our output went away,
    143 terminated; in every case what was begun is cleaned up.
    """
    printable_streams()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        # Arguments are bytes decoded by the locale; read them as the UTF-8 that they are.
        main([os.fsencode(argument).decode("utf-8", errors="replace") for argument in sys.argv[1:]])
        sys.stdout.flush()
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit says nothing
        sys.exit(141)
    sys.exit(0)
