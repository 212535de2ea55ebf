"""Download official archives of published data sets, check them, and unpack them into
`listings`' layouts.

An interrupted download is resumed. An archive must have its known size and sha256. It is
unpacked beside its target, so that a data set appears whole or not at all. Only regular
files of the needed folder are written.

The table of archives (assets/archives.tsv) has the sizes and checksums of the registry of
tensorflow-datasets, of domainnet those of its repository, which the package lacks. It has
no tiny_imagenet, whose checksum is the one that many projects have published for the
archive of its official address.
"""

import contextlib
import csv
import gzip
import http.client
import os
import shutil
import stat
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

import fcljax
from fcljax.archives import leads_out, sha256
from fcljax.data.files import prepared
from fcljax.errors import InputError, reason
from fcljax.files import temporary_folder
from fcljax.options import whole_number
from fcljax.terminal import say

_BLOCK = 1 << 18  # bytes in memory at a time
# Most unpacked bytes per byte of an archive. The official ones hold compressed images and
# hardly grow; a zip bomb grows a thousandfold.
_GROWTH = 10
_SLACK = 1 << 20  # bytes beyond that, for small archives


class Archive(NamedTuple):
    """An official file of a data set."""

    url: str
    bytes: int
    sha256: str
    # the needed folder within the archive; "" for a file that is not unpacked
    takes: str
    below: str = ""  # where it is unpacked, below the data folder

    @property
    def file(self) -> str:
        """Name of the file."""
        return PurePosixPath(urlsplit(self.url).path).name

    @property
    def place(self) -> PurePosixPath:
        """Path of the needed folder, relative to the data folder."""
        return PurePosixPath(self.below, self.takes or self.file)


def _official() -> dict[str, tuple[Archive, ...]]:
    """Read the table of archives, by data set."""
    archives: dict[str, tuple[Archive, ...]] = {}
    text = (resources.files("fcljax") / "assets" / "archives.tsv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines(), delimiter="\t"):
        name = row.pop("dataset")
        size = int(row.pop("bytes"))
        archives[name] = (*archives.get(name, ()), Archive(bytes=size, **row))
    return archives


OFFICIAL = _official()


class _Failed(Exception):
    """A fault of an archive; the message starts with its name."""


class _Useless(_Failed):
    """A fault after which the downloaded part is useless, and is removed."""


class _Member(NamedTuple):
    name: str
    size: int  # in bytes
    folder: bool
    regular: bool  # a file that is neither link nor device
    open: Callable[[], Any]


def fetch(
    name: str,
    archives: Sequence[Archive],
    folder: Path,
    *,
    instead: str,
    console: Console | None = None,
    timeout: float = 60.0,
) -> None:
    """Download the archives of a data set and unpack them below `folder`, unless another
    process has done so.

    All archives are downloaded and checked before the first is unpacked, and removed when
    the data set is in its place. An incomplete download stays in `folder` as
    ARCHIVE.part, and the next call resumes it.

    Args:
      archives: official files that together make one folder below `folder`.
      instead: advice for messages, if the download is impossible.
      timeout: seconds without an answer after which a server counts as lost.

    Raises:
      InputError: naming the file and the failure, for an archive that is incomplete, is
        not the official one or has unexpected members; for a folder without room or that
        cannot be written.
    """
    console = console or Console(stderr=True)
    root = folder / archives[0].place.parts[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with prepared.one_process(root, console), temporary_folder(root) as stage:
            # under the lock: another process may have fetched them while this one waited
            if not all((folder / archive.place).exists() for archive in archives):
                _fetch(name, archives, folder, stage, console, timeout)
    except _Failed as error:
        raise InputError(f"dataset: cannot download {name!r}: {error}; try again, or {instead}") from error
    except OSError as error:
        raise InputError(
            f"data_dir: cannot write {name!r} to {str(folder)!r} ({error.strerror or error}); "
            "choose another with --data-dir or FCLJAX_DATA"
        ) from error


def fetch_file(
    field: str, archive: Archive, target: Path, console: Console | None = None, timeout: float = 60.0
) -> None:
    """Download one file to `target`, whole and checked.

    An interrupted download stays as TARGET.part, and the next call resumes it.

    Args:
      field: for messages.

    Raises:
      InputError: naming the file and the failure.
    """
    console = console or Console(stderr=True)
    part = target.with_name(f"{target.name}.part")
    try:
        with prepared.one_process(target, console):
            if not target.exists():
                say(console, f"downloading {target}, {_readable(archive.bytes)}")
                with _progress(console) as progress:
                    task = progress.add_task(archive.file, total=archive.bytes)
                    _download(archive, part, partial(progress.update, task), timeout)
                os.replace(part, target)
    except _Useless as error:
        part.unlink(missing_ok=True)
        raise InputError(f"{field}: cannot download {archive.url}: {error}; try again") from error
    except _Failed as error:
        raise InputError(f"{field}: cannot download {archive.url}: {error}; try again") from error


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    columns += (TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def volume(archives: Sequence[Archive]) -> str:
    """Return the size of the download for people: "1.2 GB"."""
    return _readable(sum(archive.bytes for archive in archives))


def _fetch(
    name: str, archives: Sequence[Archive], folder: Path, stage: Path, console: Console, timeout: float
) -> None:
    parts = [_part(folder, archive) for archive in archives]
    # room for the archive and its content, which is hardly larger, less what is here
    # already
    need = sum(int(2.1 * archive.bytes) - _size(part) for archive, part in zip(archives, parts, strict=True))
    free = shutil.disk_usage(folder).free
    if need > free:
        raise InputError(
            f"data_dir: {str(folder)!r} has {_readable(free)} left, and the archives of {name!r} with their "
            f"contents need {_readable(need)}; choose another with --data-dir or FCLJAX_DATA"
        )
    say(console, f"downloading {name}, {volume(archives)}, to {folder}")
    with _progress(console) as progress:
        # two passes: all archives are checked before the first is unpacked
        steps = ("", partial(_download, timeout=timeout)), ("unpacking ", partial(_unpack, stage=stage))
        for verb, work in steps:
            for archive, part in zip(archives, parts, strict=True):
                task = progress.add_task(f"{verb}{archive.file}", total=archive.bytes)
                try:
                    work(archive, part, partial(progress.update, task))
                except _Useless:
                    part.unlink(missing_ok=True)
                    raise
                finally:
                    progress.remove_task(task)
    for root in stage.iterdir():
        _move(root, folder / root.name)
    for part in parts:
        part.unlink()


def _part(folder: Path, archive: Archive) -> Path:
    # the checksum tells versions apart, the folder a real.zip from that of another data
    # set
    return folder / f"{archive.place.parts[0]}-{archive.file}.{archive.sha256[:8]}.part"


def _readable(size: int) -> str:
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    if size >= 1e6:
        return f"{size / 1e6:.1f} MB"
    return f"{size:,} bytes"


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _move(source: Path, target: Path) -> None:
    if not target.exists():
        os.replace(source, target)
        return
    # the user has other files in that folder, which stay
    for entry in source.iterdir():
        try:
            os.replace(entry, target / entry.name)
        except OSError as error:
            raise OSError(error.errno, f"{str(target / entry.name)!r} is in the way") from error


# ---- downloading -----------------------------------------------------------------------


def _download(archive: Archive, part: Path, update: Callable[..., None], timeout: float) -> None:
    """Complete and check the archive at `part`."""
    # a link in a shared folder could make this process overwrite any file of the user
    if part.is_symlink():
        raise _Failed(f"{str(part)!r} is a link, which is not followed; remove it")
    if _size(part) < archive.bytes:
        _append(archive, part, update, timeout)
    update(description=f"checking {archive.file}", completed=archive.bytes)
    if _size(part) != archive.bytes or sha256(part) != archive.sha256:
        raise _Useless(f"{archive.file} does not have the checksum of the official file and was removed")


def _append(archive: Archive, part: Path, update: Callable[..., None], timeout: float) -> None:
    position = _size(part)
    try:
        with _answer(archive, position, timeout) as response:
            # 206 is the rest that was asked for; otherwise the server sends the whole
            # file
            if response.status != 206:
                position = 0
            with open(part, "ab" if position else "wb", opener=_no_link) as stream:
                while block := _read(archive, response, position):
                    position += len(block)
                    if position > archive.bytes:
                        raise _Useless(f"{archive.file} is longer than the official file and was removed")
                    stream.write(block)
                    update(completed=position)
    # a part of 0 bytes is nothing to resume
    finally:
        if part.exists() and not _size(part):
            part.unlink()
    if position < archive.bytes:
        raise _Failed(_broken_off(archive, position, "the connection was closed"))


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _read(archive: Archive, response: Any, position: int) -> bytes:
    try:
        return response.read(_BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(_broken_off(archive, position, reason(error))) from error


def _broken_off(archive: Archive, position: int, problem: str) -> str:
    share = f"{_readable(position)} of {_readable(archive.bytes)}"
    return f"{archive.file} broke off after {share} ({problem}), and can be resumed"


@contextlib.contextmanager
def _answer(archive: Archive, start: int, timeout: float) -> Iterator[Any]:
    """Open the server's answer: the archive from `start` (status 206), or all of it (200)."""
    headers = {"User-Agent": f"fcljax/{fcljax.__version__}"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(archive.url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        # 416: the server's file ends before `start`
        failure = _Useless if error.code == 416 else _Failed
        raise failure(f"{archive.file} was refused by the server (HTTP status {error.code})") from error
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", None)
        why = reason(cause if isinstance(cause, Exception) else error)
        raise _Failed(f"{archive.file} cannot be reached ({why})") from error
    with response:
        if response.status not in (200, 206):
            raise _Failed(f"{archive.file} was answered with HTTP status {response.status}")
        begin = start if response.status == 206 else 0
        if begin and not response.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
            raise _Useless(f"{archive.file} was answered with another part than asked for")
        length = whole_number(response.headers.get("Content-Length", ""))
        if length is not None and length != archive.bytes - begin:
            raise _Failed(
                f"{archive.file} has {begin + length:,} bytes on the server, "
                f"the official file {archive.bytes:,}"
            )
        yield response


# ---- unpacking -------------------------------------------------------------------------

_DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    RuntimeError,
    ValueError,
)


def _unpack(archive: Archive, part: Path, update: Callable[..., None], stage: Path) -> None:
    """Unpack the needed folder of a checked archive below `stage`."""
    if not archive.takes:
        (stage / archive.below).mkdir(exist_ok=True)
        shutil.copyfile(part, stage / archive.place)
        return
    try:
        with part.open("rb") as raw:
            members = _zipped(raw) if archive.file.endswith(".zip") else _tarred(raw)
            for member in _needed_files(archive, members):
                target = stage / archive.below / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                with member.open() as source, target.open("wb") as destination:
                    shutil.copyfileobj(source, destination, _BLOCK)
                update(completed=raw.tell())
    except _DAMAGE as error:
        raise _Useless(f"{archive.file} cannot be unpacked ({reason(error)})") from error
    if not (stage / archive.place).exists():
        raise _Useless(f"{archive.file} has no files in {archive.takes}")


def _needed_files(archive: Archive, members: Iterator[_Member]) -> Iterator[_Member]:
    """Yield the files of the needed folder, except hidden ones."""
    size = 0
    for member in members:
        path = PurePosixPath(member.name)
        if leads_out(member.name):
            raise _Useless(f"{archive.file} holds {member.name!r}, which points outside of it")
        size += member.size
        if size > _GROWTH * archive.bytes + _SLACK:
            raise _Useless(f"{archive.file} holds more than {_GROWTH} times its own size")
        hidden = any(name.startswith(".") for name in path.parts)
        if member.folder or hidden or not path.is_relative_to(archive.takes):
            continue
        if not member.regular:
            raise _Useless(f"{archive.file} holds {member.name!r}, which is not a regular file")
        yield member


def _zipped(raw: IO[bytes]) -> Iterator[_Member]:
    with zipfile.ZipFile(raw) as packed:
        for info in packed.infolist():
            # the upper half has the mode of Unix; 0 where the archive is from another
            # system
            regular = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)
            yield _Member(info.filename, info.file_size, info.is_dir(), regular, partial(packed.open, info))


def _tarred(raw: IO[bytes]) -> Iterator[_Member]:
    with tarfile.open(fileobj=raw) as packed:
        for info in packed:
            yield _Member(info.name, info.size, info.isdir(), info.isreg(), partial(packed.extractfile, info))
