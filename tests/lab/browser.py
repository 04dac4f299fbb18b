"""Chromium without a window, as tests drive it."""

import os
import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium():
    """A browser; where there is none, tests that need it are skipped, and fail where changes are checked (CI)."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _missing("playwright is not installed")
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        _missing(f"none of {', '.join(NAMES)} is installed")
    with sync_playwright() as playwright:
        # Its sandbox needs rights that containers often lack; what it opens here is a page of our own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def _missing(reason):
    told = f"{reason}; scripts/services.sh installs what tests need"
    if os.environ.get("CI"):
        pytest.fail(told)
    pytest.skip(told)
