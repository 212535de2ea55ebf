"""Find and download weights by timm's names (ARCHITECTURE.TAG) and the Hugging Face
hub's (OWNER/NAME).

A run finds a named network in the caches, that of the hub's libraries or fcljax's, and
never downloads it. `fcljax weights get NAME` downloads it, resumes an interrupted
download, and compares it with the hub's sha256.
"""

import contextlib
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from fcljax.archives import sha256
from fcljax.data.files.download import Archive, fetch_file
from fcljax.data.files.sources import data_folder
from fcljax.errors import InputError, reason
from fcljax.files import atomic, check_folder, hugging_face_hub
from fcljax.models.weights.checkpoints import SIDECARS, SUFFIXES, TOKENIZER
from fcljax.options import whole_number

HUB = "https://huggingface.co"
# safetensors first: they can hold no code
FILES = ("model.safetensors", "pytorch_model.bin")
SIDECAR_BYTES = 1 << 26  # most bytes of a JSON file; a tokenizer has a few MiB
TIMEOUT = 60.0  # seconds without an answer


def is_hub_name(name: str) -> bool:
    """Check whether a name is timm's (ARCHITECTURE.TAG) or the hub's (OWNER/NAME)."""
    # the path of a file could look like either
    if name.startswith((".", "/")) or name.endswith(SUFFIXES):
        return False
    return bool(re.fullmatch(r"[\w-]+\.[\w.-]+|[\w.-]+/[\w.-]+", name))


def repository(name: str) -> str:
    """Return the hub's repository of a network; the owner of timm's networks is timm."""
    if "/" in name:
        return name
    return f"timm/{name}"


def find_weights(name: str, data_dir: str | Path | None = None) -> Path:
    """Return the file of a network's weights in the caches.

    Args:
      name: for which `is_hub_name` holds.
      data_dir: as of `data_folder`.

    Raises:
      InputError: if no cache has it, with the command that downloads it.
    """
    # its own cache first: there `get_weights` has compared the file with its checksum
    for folder in (_cache_folder(name, data_dir), _hub_snapshot(name)):
        for file in FILES:
            if folder is not None and (folder / file).is_file():
                return folder / file
    raise InputError(f"backbone: the weights {name!r} are not here; get them with: fcljax weights get {name}")


def _cache_folder(name: str, data_dir: str | Path | None) -> Path:
    return data_folder(data_dir) / "weights" / repository(name).replace("/", "--")


def _hub_snapshot(name: str) -> Path | None:
    """Return the newest snapshot in huggingface_hub's cache."""
    root = hugging_face_hub() / f"models--{repository(name).replace('/', '--')}"
    try:
        revision = (root / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    # the name alone, so that a damaged ref cannot lead out of the cache
    return root / "snapshots" / Path(revision).name


class Fetched(NamedTuple):
    """A downloaded network."""

    path: Path
    sha256: str
    bytes: int


def get_weights(
    name: str,
    data_dir: str | Path | None = None,
    console: Console | None = None,
) -> Fetched:
    """Download a network's weights and JSON files, unless a cache has the weights.

    Raises:
      InputError: for a wrong name, a file that the hub lacks or refuses, or one whose
        checksum differs.
    """
    if not is_hub_name(name):
        raise InputError(
            f"weights: {name!r} is not a name on the hub; expected ARCHITECTURE.TAG, as timm has them, or "
            "OWNER/NAME"
        )
    # it raises if no cache has the file, which is then downloaded below
    with contextlib.suppress(InputError):
        cached = find_weights(name, data_dir)
        return Fetched(cached, sha256(cached), cached.stat().st_size)
    folder = _cache_folder(name, data_dir)
    check_folder(folder, "data_dir")
    base = f"{os.environ.get('HF_ENDPOINT') or HUB}/{repository(name)}/resolve/main"
    archive = next((archive for file in FILES if (archive := _archive(f"{base}/{file}", name))), None)
    if archive is None:
        raise InputError(f"weights: {name!r} has no file {' or '.join(FILES)} on the hub")
    folder.mkdir(parents=True, exist_ok=True)
    # the JSON files come first: a cache that has the weights must have all facts on them
    for sidecar in (*SIDECARS, TOKENIZER):
        if content := _download_json(f"{base}/{sidecar}", name):
            with atomic(folder / sidecar) as temporary:
                temporary.write_bytes(content)
    path = folder / archive.file
    fetch_file("weights", archive, path, console, TIMEOUT)
    return Fetched(path, archive.sha256, archive.bytes)


def _archive(url: str, name: str) -> Archive | None:
    """Ask the hub for the size and the checksum of a file; None without the file."""
    # a HEAD request, which the hub answers itself, before it redirects to its store
    with _open(urllib.request.Request(url, method="HEAD"), name) as answer:
        if answer is None:
            return None
        headers = answer.headers
        # for large files the linked ETag is the sha256, and the ETag one of the
        # redirection
        tag = (headers.get("X-Linked-Etag") or headers.get("ETag") or "").strip('W/"')
        size = whole_number(headers.get("X-Linked-Size") or headers.get("Content-Length") or "")
        if not re.fullmatch("[0-9a-f]{64}", tag) or size is None:
            raise InputError(f"weights: the hub states no checksum or size of {url}")
        return Archive(url, size, tag, "")


def _download_json(url: str, name: str) -> bytes | None:
    """Download a small JSON file; None if the hub has none."""
    with _open(urllib.request.Request(url), name, redirect=True) as answer:
        content = None
        if answer is not None:
            content = answer.read(SIDECAR_BYTES)
    if content:
        try:
            json.loads(content)
        except (ValueError, RecursionError):
            raise InputError(f"weights: {url} is not JSON") from None
    return content


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: the hub's answer has the checksum, that of its store does
    not."""

    def redirect_request(self, *_: object) -> None:  # pyrefly: ignore[bad-override]
        return None


@contextlib.contextmanager
def _open(
    request: urllib.request.Request,
    name: str,
    redirect: bool = False,
) -> Iterator[Any]:
    """Open the hub's answer; None if it has no such file."""
    handlers = []
    # the answer before the redirection has the checksum
    if not redirect:
        handlers = [_NoRedirect]
    opener = urllib.request.build_opener(*handlers)
    try:
        answer = opener.open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            yield None
            return
        if not 300 <= error.code < 400:
            raise InputError(
                f"weights: the hub refuses {name!r} (HTTP status {error.code}); if it is gated, log in and "
                "fetch it with the hub's own program, whose cache is read too"
            ) from error
        # `urllib` calls it an error, because it was told not to follow
        answer = error  # a redirection, whose headers have the checksum
    except (OSError, HTTPException) as error:
        cause = getattr(error, "reason", None)
        why = reason(cause if isinstance(cause, Exception) else error)
        raise InputError(f"weights: the hub cannot be reached for {name!r} ({why})") from error
    with contextlib.closing(answer):
        yield answer
