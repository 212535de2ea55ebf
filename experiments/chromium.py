"""A page in a headless Chromium, driven over its debugging pipe: no package is needed, only the browser.

Every request of the page is noted, so that a test can say that none leaves the file.
"""

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Page(NamedTuple):
    """An open page.

    evaluate: the JSON value of a JavaScript expression, a promise's when it is kept.
    send: any command of the DevTools protocol, and its result.
    errors: what the console reported, and exceptions, so far.
    requests: the addresses that the page asked for so far.
    """

    evaluate: Callable[[str], Any]
    send: Callable[..., dict[str, Any]]
    errors: list[str]
    requests: list[str]


def binary() -> str | None:
    """The browser's program; None if there is none here."""
    return next((found for name in BINARIES if (found := shutil.which(name))), None)


@contextlib.contextmanager
def opened(path: str | Path, width: int = 1200, height: int = 900, mobile: bool = False) -> Iterator[Page]:
    """Open a file as a page, with a window of this size, until it is loaded.

    Raises:
      RuntimeError: there is no browser, or it says that something went wrong.
    """
    program = binary()
    if program is None:
        raise RuntimeError("no Chromium is installed")
    if not Path(path).is_file():
        raise RuntimeError(f"no file {path}")
    with tempfile.TemporaryDirectory() as home, _pipes(program, home) as (write, read):
        page = _connect(write, read)
        page.send("Page.enable")
        page.send("Runtime.enable")
        page.send("Log.enable")
        page.send("Network.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        page.send("Emulation.setDeviceMetricsOverride", **size)
        page.send("Page.navigate", url=Path(path).resolve().as_uri())
        ready = "document.readyState === 'complete' && location.protocol === 'file:'"
        while not page.evaluate(ready):
            pass
        yield page


def screenshot(page: Page, path: str | Path, height: int | None = None) -> None:
    """Save what the window shows as a PNG; `height`: of the part of the page, from its top."""
    clip = {}
    if height is not None:
        width = page.evaluate("document.documentElement.clientWidth")
        clip = {
            "clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1},
            "captureBeyondViewport": True,
        }
    shot = page.send("Page.captureScreenshot", format="png", **clip)
    Path(path).write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def _pipes(program: str, home: str) -> Iterator[tuple[int, int]]:
    """The browser, which reads commands from its file 3 and writes answers to its file 4."""
    (their_in, our_out) = os.pipe()
    (our_in, their_out) = os.pipe()
    # above 4, so that none of them is in the way of the numbers that the browser wants
    wanted = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (their_in, their_out)]
    flags = [
        "--headless=new",
        "--remote-debugging-pipe",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        f"--user-data-dir={home}",
        "about:blank",
    ]
    shell = f'exec "$@" 3<&{wanted[0]} 4>&{wanted[1]}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", program, *flags],
        pass_fds=wanted,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HOME": home},
    )
    for each in (their_in, their_out, *wanted):
        os.close(each)
    try:
        yield our_out, our_in
    finally:
        os.close(our_out)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()
        os.close(our_in)


def _connect(write: int, read: int) -> Page:
    """A session with the browser's first page."""
    number = [0]
    buffer = bytearray()
    session = {}
    errors: list[str] = []
    requests: list[str] = []

    def receive() -> dict[str, Any]:
        while b"\0" not in buffer:
            found = os.read(read, 2**20)
            if not found:
                raise RuntimeError("the browser has ended")
            buffer.extend(found)
        message, _, rest = bytes(buffer).partition(b"\0")
        buffer[:] = rest
        return json.loads(message)

    def send(method: str, **params: Any) -> dict[str, Any]:
        number[0] += 1
        command = {"id": number[0], "method": method, "params": params, **session}
        _write_all(write, json.dumps(command).encode() + b"\0")
        while True:
            message = receive()
            if message.get("id") == number[0]:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            _note(message, errors, requests)

    def evaluate(expression: str) -> Any:
        found = send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression[:200]}: {found['exceptionDetails']}")
        return found["result"].get("value")

    targets = send("Target.getTargets")["targetInfos"]
    first = next(target["targetId"] for target in targets if target["type"] == "page")
    session["sessionId"] = send("Target.attachToTarget", targetId=first, flatten=True)["sessionId"]
    return Page(evaluate, send, errors, requests)


def _write_all(handle: int, content: bytes) -> None:
    while content:
        content = content[os.write(handle, content) :]


def _note(message: dict[str, Any], errors: list[str], requests: list[str]) -> None:
    """Keep what an event says of errors and requests."""
    params = message.get("params", {})
    match message.get("method"):
        case "Runtime.exceptionThrown":
            errors.append(str(params["exceptionDetails"]))
        case "Runtime.consoleAPICalled":
            if params["type"] in ("error", "warning", "assert"):
                errors.append(str(params["args"]))
        case "Log.entryAdded":
            if params["entry"]["level"] in ("error", "warning"):
                errors.append(params["entry"]["text"])
        case "Network.requestWillBeSent":
            requests.append(params["request"]["url"])
