"""Real Flower processes on the loopback device: a SuperLink and SuperNodes, each of which can be killed."""

import contextlib
import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from small_runs import ROOT

HOUR = datetime.timedelta(hours=1)

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


def make_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A private key in the file `path`, and its public one beside it with the suffix .pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    public = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    Path(f"{path}.pub").write_bytes(key.public_key().public_bytes(*public))
    return key


def make_certificates(folder: Path) -> None:
    """ca.crt, and server.pem with server.key for 127.0.0.1."""
    now, authority, server = datetime.datetime.now(datetime.UTC), make_rsa(), make_rsa()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    for file, key, extension in (
        ("ca.crt", authority, x509.BasicConstraints(True, None)),
        ("server.pem", server, x509.SubjectAlternativeName(names)),
    ):
        issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ca")])
        builder = x509.CertificateBuilder().subject_name(issuer if key is authority else name)
        builder = builder.issuer_name(issuer).public_key(key.public_key()).add_extension(extension, False)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - HOUR)
        signed = builder.not_valid_after(now + 24 * HOUR).sign(authority, hashes.SHA256())
        (folder / file).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    (folder / "server.key").write_bytes(server.private_bytes(serialization.Encoding.PEM, *form))


def make_rsa() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


class Machines:
    """A SuperLink at a free port, and SuperNodes by their client's id."""

    def __init__(self, folder: Path, secure: bool = False):
        self.folder, self.port, self.secure = folder, free_port(), secure
        self.running: dict[str, subprocess.Popen] = {}
        (folder / "home").mkdir()
        trust = "insecure = true"
        if secure:
            make_certificates(folder)
            trust = f'root-certificates = "{folder / "ca.crt"}"'
        connection = f'address = "127.0.0.1:{self.port}"\n{trust}\n'
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
        files = {"ssl-ca-certfile": "ca.crt", "ssl-certfile": "server.pem", "ssl-keyfile": "server.key"}
        secure = [word for name, file in files.items() for word in (f"--{name}", str(self.folder / file))]
        self.start(
            "superlink",
            "flower-superlink",
            *([*secure, "--enable-supernode-auth"] if self.secure else ["--insecure"]),
            "--port",
            str(self.port),
            "--disable-runtime-dependency-installation",
        )
        self.wait_for(lambda: listens(self.port), 60.0)

    def register(self, key: str) -> int:
        """Make a key and register it; the number of its node."""
        make_key(self.folder / key)
        reply = self.flwr("supernode", "register", str(self.folder / f"{key}.pub"), "--format", "json")
        return int(json.loads(reply)["node-id"])

    def node(self, client: int, config: str = "", key: str = "") -> None:
        """Start a SuperNode; with TLS its key is in the file `key`."""
        trust = ["--root-certificates", str(self.folder / "ca.crt")] if self.secure else ["--insecure"]
        trust += ["--auth-supernode-private-key", str(self.folder / key)] if key else []
        self.start(
            f"node-{client}{key}",
            "flower-supernode",
            *trust,
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
def machines(folder: Path, secure: bool = False) -> Iterator[Machines]:
    found = Machines(folder, secure)
    try:
        found.link()
        yield found
    finally:
        for name in [*found.running]:
            found.kill(name)
