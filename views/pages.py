"""HTML pages that need no network and no other file. Their templates lie here; Jinja escapes what goes in."""

import base64
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data.files import written_whole


@cache
def _templates() -> Environment:
    folder = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def picture_address(png: bytes) -> str:
    """A picture as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def write_page(path: Path, template: str, **values: Any) -> None:
    """Fill a template and write the page.

    Raises:
        OSError: the file cannot be written.
    """
    page = _templates().get_template(template).render(**values)
    with written_whole(path) as file:
        file.write(page.encode("utf-8", errors="replace"))  # file names may hold what UTF-8 does not
