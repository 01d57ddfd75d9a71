"""What the browser tests share: Chromium, skipped with the reason where it is missing, a failure where it is required."""

import os
import shutil

import pytest

# No sandbox: containers run as root. The rest keeps the browser itself from asking other hosts for anything.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def give_up():
    """Skips with a reason, or fails if the environment variable LIPMDEQ_REQUIRE_BROWSER is set, as in `.ci/run`."""

    def stop(reason: str) -> None:
        if os.environ.get("LIPMDEQ_REQUIRE_BROWSER"):
            pytest.fail(f"required here: {reason}")
        pytest.skip(reason)

    return stop


@pytest.fixture(scope="module")
def browser(give_up):
    """A headless Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next((found for found in map(shutil.which, names) if found), None)
    if chromium is None:
        give_up("no Chromium on this machine (Debian, Ubuntu: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()
