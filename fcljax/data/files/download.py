"""Official archives of published data sets: downloaded, checked, unpacked into the layouts `listings` finds.

An archive is resumed where its download broke off, has to have the size and the sha256 that are known of it,
and is unpacked beside its place, which a set takes in one piece or not at all. Only regular files of the part
that is wanted are ever written.

Sizes and checksums are those of the registry of tensorflow-datasets (of domainnet: of its repository, the
package lacks that file); it has no tiny_imagenet, whose checksum is the one that many projects have published
for the archive of its official address.
"""

import contextlib
import gzip
import hashlib
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
from pathlib import Path, PurePosixPath, PureWindowsPath
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
from fcljax.data.files import prepared
from fcljax.data.files.images import one_line
from fcljax.errors import InputError
from fcljax.files import temporary_folder
from fcljax.terminal import say

_BLOCK = 1 << 18  # bytes in memory at a time
# how many times its own size an archive may grow; the official ones hold compressed images and hardly do
_GROWTH = 10
_SLACK = 1 << 20  # bytes beyond that, for the small ones


class Archive(NamedTuple):
    """An official file of a data set."""

    url: str
    bytes: int
    sha256: str
    takes: str  # the folder within that is wanted; "" for a file that is kept as it is
    below: str = ""  # the folder that it goes to, below the data folder

    @property
    def file(self) -> str:
        """Its name, as people know it."""
        return PurePosixPath(urlsplit(self.url).path).name

    @property
    def place(self) -> PurePosixPath:
        """Where what is wanted of it goes, relative to the data folder."""
        return PurePosixPath(self.below, self.takes or self.file)


_KRIZ = "https://www.cs.toronto.edu/~kriz"
_OMNIGLOT = "https://github.com/brendenlake/omniglot/raw/master/python"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_VISDA = "http://csr.bu.edu/ftp/visda/2019/multi-source"

_IMAGENET_R = (
    Archive(
        "https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar",
        2_191_079_936,
        "18c6bf493b39a0d975d48e587437f562caab9c52ae6327dcfa9dd8eb54aa1b52",
        "imagenet-r",
    ),
)

OFFICIAL = {
    "cifar10": (
        Archive(
            f"{_KRIZ}/cifar-10-binary.tar.gz",
            170_052_171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            "cifar-10-batches-bin",
        ),
    ),
    "cifar100": (
        Archive(
            f"{_KRIZ}/cifar-100-binary.tar.gz",
            168_513_733,
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            "cifar-100-binary",
        ),
    ),
    "imagenet_r": _IMAGENET_R,
    "imagenet_r_hepco": _IMAGENET_R,
    "cub200": (
        Archive(
            "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1",
            1_150_585_339,
            "0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
            "CUB_200_2011/images",
        ),
    ),
    "domainnet": tuple(
        Archive(f"{_VISDA}/{path}.zip", size, sha256, path.rpartition("/")[2], "domainnet")
        for path, size, sha256 in (
            (
                "groundtruth/clipart",
                1_270_909_081,
                "f8f248a3e8bbc9868c523ae24e6601b4c2ad102afc60c0efeb4f3255df22354d",
            ),
            ("infograph", 4_338_659_804, "891e14f476317e97b6f06d6498c11d0a5b8d0c8b57210765ed9beb072da611fa"),
            (
                "groundtruth/painting",
                3_679_366_174,
                "fa47e6d405503ea0286cabd767f176bd30e988b63ddd7b9db16cf030c9770015",
            ),
            ("quickdraw", 459_920_701, "9f37df2a8c3733703dbb35ad9964202a65f675ca30137756457537536b485d84"),
            ("real", 6_062_039_589, "d7fe010b430c5b510f85d657d38c4a1924822695fabea4fef57bd00dba251d63"),
            ("sketch", 2_633_992_926, "23a7dbae7016b343e934399beaa8a68728fb5e570ebe2c71df9b75cf91c499fc"),
        )
    ),
    "tiny_imagenet": (
        Archive(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            248_100_043,
            "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
            "tiny-imagenet-200",
        ),
    ),
    "omniglot": tuple(
        Archive(f"{_OMNIGLOT}/{part}.zip", size, sha256, part, "omniglot")
        for part, size, sha256 in (
            (
                "images_background",
                9_464_212,
                "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640",
            ),
            (
                "images_evaluation",
                6_462_886,
                "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee",
            ),
        )
    ),
    "fashion_mnist": tuple(
        Archive(f"{_FASHION}/{file}-ubyte.gz", size, sha256, "", "fashion_mnist")
        for file, size, sha256 in (
            (
                "train-images-idx3",
                26_421_880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            ("train-labels-idx1", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (
                "t10k-images-idx3",
                4_422_102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            ("t10k-labels-idx1", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        )
    ),
}


class _Failed(Exception):
    """What is wrong with an archive, in words that start with its name."""


class _Useless(_Failed):
    """As above, and what has come of it is not worth keeping."""


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
    """Download the archives of a data set and unpack them below `folder`, unless another process has done so.

    All archives are there and checked before the first is unpacked, and removed when the set has taken its
    place. What has come of an archive when its download ends early stays in `folder` as ARCHIVE.part, and the
    next call goes on from there.

    Args:
      archives: official files that together make one folder below `folder`.
      instead: what else the user can do, for messages.
      timeout: seconds without an answer after which a server counts as lost.

    Raises:
      InputError: naming the file and what failed, if one cannot be had whole, is not the official one or
        holds what it should not; for a folder without room or that cannot be written.
    """
    console = console or Console(stderr=True)
    root = folder / archives[0].place.parts[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with prepared.alone(root, console), temporary_folder(root) as stage:
            if not all((folder / archive.place).exists() for archive in archives):
                _fetch(name, archives, folder, stage, console, timeout)
    except _Failed as error:
        raise InputError(f"dataset: cannot download {name!r}: {error}; try again, or {instead}") from error
    except OSError as error:
        raise InputError(
            f"data_dir: cannot write {name!r} to {str(folder)!r} ({error.strerror or error}); "
            "choose another with --data-dir or FCLJAX_DATA"
        ) from error


def volume(archives: Sequence[Archive]) -> str:
    """What is to be downloaded, for people: "1.2 GB"."""
    return _readable(sum(archive.bytes for archive in archives))


def leads_out(member: str) -> bool:
    """Whether the path of a member of an archive leaves the folder that it is unpacked to, on any system."""
    paths = PurePosixPath(member), PureWindowsPath(member)
    return any(path.is_absolute() or path.drive or path.root or ".." in path.parts for path in paths)


def _fetch(
    name: str, archives: Sequence[Archive], folder: Path, stage: Path, console: Console, timeout: float
) -> None:
    parts = [_part(folder, archive) for archive in archives]
    _check_space(name, archives, parts, folder)
    say(console, f"downloading {name}, {volume(archives)}, to {folder}")
    with _progress(console) as progress:
        for archive, part in zip(archives, parts, strict=True):
            _get(archive, part, progress, timeout)
        for archive, part in zip(archives, parts, strict=True):
            _unpack(archive, part, stage, progress)
    for root in stage.iterdir():
        _move(root, folder / root.name)
    for part in parts:
        part.unlink()


def _readable(size: int) -> str:
    return (
        f"{size / 1e9:.1f} GB"
        if size >= 1e9
        else f"{size / 1e6:.1f} MB"
        if size >= 1e6
        else f"{size:,} bytes"
    )


def _part(folder: Path, archive: Archive) -> Path:
    # The checksum tells it from what is left of another version, the folder from a real.zip of another set.
    return folder / f"{archive.place.parts[0]}-{archive.file}.{archive.sha256[:8]}.part"


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _check_space(name: str, archives: Sequence[Archive], parts: Sequence[Path], folder: Path) -> None:
    need = sum(int(2.1 * archive.bytes) - _size(part) for archive, part in zip(archives, parts, strict=True))
    free = shutil.disk_usage(folder).free
    if need > free:
        raise InputError(
            f"data_dir: {str(folder)!r} has {_readable(free)} left, the archives of {name!r} and what is in "
            f"them need {_readable(need)}; choose another with --data-dir or FCLJAX_DATA"
        )


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


def _move(source: Path, target: Path) -> None:
    if not target.exists():
        os.replace(source, target)
        return
    for entry in source.iterdir():  # the user has something else in that folder
        try:
            os.replace(entry, target / entry.name)
        except OSError as error:
            raise OSError(error.errno, f"{str(target / entry.name)!r} is in the way") from error


# Downloading


def _get(archive: Archive, part: Path, progress: Progress, timeout: float) -> None:
    """The whole archive, checked, at `part`."""
    if part.is_symlink():
        raise _Failed(f"{str(part)!r} is a link, which is not followed; remove it")
    task = progress.add_task(archive.file, total=archive.bytes)
    try:
        if _size(part) < archive.bytes:
            _append(archive, part, partial(progress.update, task), timeout)
        progress.update(task, description=f"checking {archive.file}", completed=archive.bytes)
        with part.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        if _size(part) != archive.bytes or sha256 != archive.sha256:
            raise _Useless(f"{archive.file} does not have the checksum of the official file and was removed")
    except _Useless:
        part.unlink(missing_ok=True)
        raise
    finally:
        progress.remove_task(task)


def _append(archive: Archive, part: Path, update: Callable[..., None], timeout: float) -> None:
    done = _size(part)
    try:
        with _answer(archive, done, timeout) as response:
            done = done if response.status == 206 else 0
            with open(part, "ab" if done else "wb", opener=_no_link) as stream:
                while block := _read(archive, response, done):
                    done += len(block)
                    if done > archive.bytes:
                        raise _Useless(f"{archive.file} is longer than the official file and was removed")
                    stream.write(block)
                    update(completed=done)
    finally:
        if part.exists() and not _size(part):
            part.unlink()
    if done < archive.bytes:
        raise _Failed(_broken_off(archive, done, "the connection was closed"))


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _read(archive: Archive, response: Any, done: int) -> bytes:
    try:
        return response.read(_BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(_broken_off(archive, done, one_line(error))) from error


def _broken_off(archive: Archive, done: int, reason: str) -> str:
    share = f"{_readable(done)} of {_readable(archive.bytes)}"
    return f"{archive.file} broke off after {share} ({reason}), the rest can follow"


@contextlib.contextmanager
def _answer(archive: Archive, start: int, timeout: float) -> Iterator[Any]:
    """The server's answer: the archive from `start` on (status 206), or all of it (status 200)."""
    headers = {"User-Agent": f"fcljax/{fcljax.__version__}"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(archive.url, headers=headers), timeout=timeout
        )
    except urllib.error.HTTPError as error:
        error.close()
        kind = _Useless if error.code == 416 else _Failed  # 416: the server's file ends before `start`
        raise kind(f"{archive.file} was refused by the server (HTTP status {error.code})") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(
            f"{archive.file} cannot be reached ({one_line(getattr(error, 'reason', None) or error)})"
        ) from error
    with response:
        if response.status not in (200, 206):
            raise _Failed(f"{archive.file} was answered with HTTP status {response.status}")
        begin = start if response.status == 206 else 0
        if begin and not response.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
            raise _Useless(f"{archive.file} was answered with another part than asked for")
        length = response.headers.get("Content-Length", "")
        if length.isdigit() and int(length) != archive.bytes - begin:
            raise _Failed(
                f"{archive.file} has {begin + int(length):,} bytes on the server, "
                f"the official file {archive.bytes:,}"
            )
        yield response


# Unpacking


def _unpack(archive: Archive, part: Path, stage: Path, progress: Progress) -> None:
    """What is wanted of a checked archive, below `stage`."""
    task = progress.add_task(f"unpacking {archive.file}", total=archive.bytes)
    try:
        if not archive.takes:
            (stage / archive.below).mkdir(exist_ok=True)
            shutil.copyfile(part, stage / archive.place)
            return
        with part.open("rb") as raw:
            if not _extract(
                archive, raw, stage / archive.below, lambda: progress.update(task, completed=raw.tell())
            ):
                raise _Useless(f"{archive.file} has no files in {archive.takes}")
    except (
        zipfile.BadZipFile,
        tarfile.TarError,
        gzip.BadGzipFile,
        zlib.error,
        EOFError,
        RuntimeError,
        ValueError,
    ) as error:
        part.unlink()
        raise _Failed(f"{archive.file} cannot be unpacked ({one_line(error)})") from error
    except _Useless:
        part.unlink()
        raise
    finally:
        progress.remove_task(task)


def _extract(archive: Archive, raw: IO[bytes], folder: Path, advance: Callable[[], None]) -> int:
    """The number of files that were written."""
    count, size = 0, 0
    for member in _zipped(raw) if archive.file.endswith(".zip") else _tarred(raw):
        path = PurePosixPath(member.name)
        if leads_out(member.name):
            raise _Useless(f"{archive.file} holds {member.name!r}, which leads out of it")
        size += member.size
        if size > _GROWTH * archive.bytes + _SLACK:
            raise _Useless(f"{archive.file} holds more than {_GROWTH} times its own size")
        if (
            member.folder
            or not path.is_relative_to(archive.takes)
            or any(name.startswith(".") for name in path.parts)
        ):
            continue
        if not member.regular:
            raise _Useless(f"{archive.file} holds {member.name!r}, which is no regular file")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with member.open() as source, (folder / path).open("wb") as target:
            shutil.copyfileobj(source, target, _BLOCK)
        count += 1
        advance()
    return count


def _zipped(raw: IO[bytes]) -> Iterator[_Member]:
    with zipfile.ZipFile(raw) as packed:
        for info in packed.infolist():
            # 0: by a system without such types
            regular = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)
            yield _Member(info.filename, info.file_size, info.is_dir(), regular, partial(packed.open, info))


def _tarred(raw: IO[bytes]) -> Iterator[_Member]:
    with tarfile.open(fileobj=raw) as packed:
        for info in packed:
            yield _Member(info.name, info.size, info.isdir(), info.isreg(), partial(packed.extractfile, info))
