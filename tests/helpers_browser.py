"""A real browser for the tests of pages: headless Chromium, driven by playwright.

playwright comes with the extra `browser` and is used with the system's Chromium, since its own build is a download.
A test asks for the fixture `browser` (tests/conftest.py), which skips where either is missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDTHS = (1280, 390)  # a laptop's window and a phone's, in CSS pixels
_HEIGHT = 844


def chromium() -> str | None:
    """The program to drive: `TRACE_JAX_CHROMIUM`, else the first of the usual names on the path."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return os.environ.get("TRACE_JAX_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@contextmanager
def opened(browser: Any, path: Path, width: int, *, scheme: str = "light") -> Iterator[Any]:
    """A page at `width` CSS pixels in a fresh context without network; on leaving, nothing may have gone wrong on it.

    Raises:
        AssertionError: the page logged an error, threw, asked for anything but itself, or scrolls sideways.
    """
    context = browser.new_context(viewport={"width": width, "height": _HEIGHT}, color_scheme=scheme, offline=True)
    page, faults = context.new_page(), []
    page.on("console", lambda m: faults.append(f"console: {m.text}") if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: faults.append(f"thrown: {e}"))
    page.on("requestfailed", lambda r: faults.append(f"asked for {r.url}"))
    try:
        page.goto(path.resolve().as_uri())
        yield page
        wide, seen = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= seen, f"{path.name} is {wide} pixels wide in a window of {seen}"
        assert not faults, faults
    finally:
        context.close()
