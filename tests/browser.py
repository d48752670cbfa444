"""A real browser for the tests of the pages: headless Chromium, as installed on the machine."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser; where none is installed the test is skipped, but not in CI."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium is installed")
        pytest.skip("no Chromium is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page that is open, and what went wrong or over the network while it was.

    Args:
        browser: from `chromium`.
        path: of the page.
        options: of the browser's context, such as viewport and color_scheme.
    """

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.addresses: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"a dialog: {dialog.message}"))
        self.page.on("request", lambda request: self.addresses.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready], #problem:not([hidden])", state="attached")

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()

    def text(self, selector: str) -> str:
        """What a person reads there."""
        return str(self.page.inner_text(selector))
