"""Real Flower processes on the loopback device: a SuperLink and SuperNodes, each of which can be killed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from small_runs import ROOT

BIN = Path(sys.executable).parent
APP = """
from fcljax.bridges.flower import client_app, server_app

client = client_app()
server = server_app()
"""
PROJECT = """
[project]
name = "federation"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "fcljax"

[tool.flwr.app.components]
serverapp = "federation.app:server"
clientapp = "federation.app:client"

[tool.flwr.app.config]
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


class Machines:
    """A SuperLink at a free port, and SuperNodes by their client's id."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, free_port()
        self.running: dict[str, subprocess.Popen] = {}
        (folder / "home").mkdir()
        connection = f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{connection}'
        (folder / "home" / "config.toml").write_text(text)
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        self.env = os.environ | {
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
        }

    def start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                env=self.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """End a process and all that it has started, without a word."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.running.pop(name).pid, signal.SIGKILL)

    def link(self) -> None:
        self.start(
            "superlink",
            "flower-superlink",
            "--insecure",
            "--port",
            str(self.port),
            "--disable-runtime-dependency-installation",
        )
        self.wait_for(lambda: listens(self.port), 60.0)

    def node(self, client: int, config: str = "") -> None:
        self.start(
            f"node-{client}",
            "flower-supernode",
            "--insecure",
            "--superlink",
            f"127.0.0.1:{self.port}",
            "--port",
            str(free_port()),
            "--node-config",
            f"partition-id={client} {config}",
        )

    def submit(self, settings: dict) -> str:
        """`flwr run`; the run's number."""
        app = self.folder / "federation"
        (app / "federation").mkdir(parents=True)
        (app / "federation" / "__init__.py").touch()
        (app / "federation" / "app.py").write_text(APP)
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        (app / "pyproject.toml").write_text(PROJECT + "\n".join(lines) + "\n")
        reply = self.flwr("run", str(app), "--format", "json")
        found = json.loads(reply)
        assert found.get("success"), reply
        return found["run-id"]

    def flwr(self, *arguments: str) -> str:
        command = [str(BIN / "flwr"), *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def wait_for(self, what, seconds: float = 400.0):
        """The first true value of what()."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = what()
            if found:
                return found
            assert all(each.poll() is None for each in self.running.values()), self.logs()
            time.sleep(0.5)
        raise AssertionError(self.logs())


@contextlib.contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    found = Machines(folder)
    try:
        found.link()
        yield found
    finally:
        for name in [*found.running]:
            found.kill(name)
