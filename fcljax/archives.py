"""Zip and npz files from untrusted sources, whose content is checked before it is used."""

import hashlib
import math
import zipfile
from collections.abc import Container
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from fcljax.errors import reason


def sha256(path: Path) -> str:
    """Return the hex digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def leads_out(member: str) -> bool:
    """Return whether a member would be unpacked outside the archive's folder, on any system."""
    # both readings on every system: a posix path may hide "..\\" or "C:" for Windows
    paths = PurePosixPath(member), PureWindowsPath(member)
    return any(path.is_absolute() or path.drive or path.root or ".." in path.parts for path in paths)


def check_members(archive: zipfile.ZipFile, limit: int) -> None:
    """Check the names of all members and the size of their contents.

    Raises:
      ValueError: for a member that leads out of the archive, or more than `limit` bytes
        when unpacked.
    """
    for name in archive.namelist():
        if leads_out(name):
            raise ValueError(f"it contains a file named {name!r}, which points outside of it")
    # zipfile never unpacks more of a member than the size that it states
    size = sum(member.file_size for member in archive.infolist())
    if size > limit:
        raise ValueError(
            f"it would unpack to {size / 2**30:.1f} GiB, and the limit is {limit / 2**30:.1f} GiB"
        )


def npz_names(path: Path) -> list[str]:
    """Return the names of the arrays of a .npz file, in its order.

    Raises:
      zipfile.BadZipFile: for another file; or another error of the parser of zip.
    """
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def read_npz(
    path: Path,
    limit: int,
    names: Container[str] | None = None,
) -> dict[str, np.ndarray]:
    """Read the arrays of a .npz file, without unpickling.

    Args:
      path: of the file.
      limit: bytes that it may unpack to.
      names: the arrays to read, as far as they are there; None reads all.

    Raises:
      ValueError: as `check_members`, and for an array that is cut off or holds Python
        objects. A damaged file can raise anything else that the parsers of zip and npy
        raise.
    """
    # np.load would also take a bare .npy or a pickle of this name
    with zipfile.ZipFile(path) as archive:
        check_members(archive, limit)
    # our own handle: np.load leaves its own open when the archive is damaged
    with path.open("rb") as stream, np.lib.npyio.NpzFile(stream, allow_pickle=False) as file:
        return {name: _array(file, name) for name in file.files if names is None or name in names}


def _array(file: Any, name: str) -> np.ndarray:
    """Read an array, after checking that its header fits its size: numpy would allocate
    whatever a header claims."""
    # np.savez adds .npy to the names; other programs may not
    member = name
    if name not in file.zip.namelist():
        member = f"{name}.npy"
    with file.zip.open(member) as stream:
        read_header = np.lib.format.read_array_header_2_0
        if np.lib.format.read_magic(stream) == (1, 0):
            read_header = np.lib.format.read_array_header_1_0
        # a header is a Python literal, whose parser raises errors of many kinds
        try:
            shape, _, kind = read_header(stream)
        except Exception as error:
            raise ValueError(f"{name} has no numpy header: {reason(error)}") from None
    # arrays of Python objects have no fixed size; `allow_pickle=False` refuses them below
    if not kind.hasobject and math.prod(shape) * kind.itemsize > file.zip.getinfo(member).file_size:
        raise ValueError(f"{name} is cut off")
    return file[name]
