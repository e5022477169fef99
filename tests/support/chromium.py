"""Opens a page in a real browser. The apt package is `chromium`."""

import shutil
import subprocess
from pathlib import Path

import pytest
from waiting import HANG_S

browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(browser is None, reason="no Chromium is installed")


def browse(page: Path, *options: str, fragment: str = "", size: str = "1400,4000") -> str:
    """What the browser prints; it finds no host, and an error on the page's console fails the test."""
    assert browser is not None
    command = [
        *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--virtual-time-budget=5000"),
        *(f"--user-data-dir={page.parent / 'profile'}", f"--window-size={size}", *options),
        f"{page.as_uri()}{fragment}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout
