"""Files of weights as named arrays: .safetensors, .npz, torch's .pth, .pt and .bin, and the Hugging Face hub.

No code in a file is ever executed. safetensors and npz hold none; a torch file is a pickle, so its opcodes
are checked first, without running them, and then read by a reader that knows only tensors and plain
containers (`torch_zip.py`). Files before torch 1.6 are no zips and need torch's own weights-only loader
(`fcljax[torch]`).
"""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import pickle
import pickletools
import re
import struct
import tarfile
import warnings
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from fcljax.archives import check_members, read_npz, sha256
from fcljax.errors import InputError, reason
from fcljax.models.weights.torch_zip import check_unpacked, read_torch_zip, tensors_in

TORCH = (".pth", ".pt", ".bin")
SUFFIXES = (".safetensors", ".npz", *TORCH)
ZIP_LIMIT = 16 * 2**30  # bytes that an archive may unpack to
FILE_LIMIT = 64 * 2**30  # bytes of any other file

_TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}

# Names in the pickles of state dicts, optimisers and numpy scalars; none of them has any effect outside.
_HARMLESS = re.compile(
    r"collections\.(OrderedDict|Counter)|argparse\.Namespace|_codecs\.encode"
    r"|numpy\.(dtype|_?core\.multiarray\.scalar|dtypes\.\w+DType)"
    r"|torch\.(\w*Storage|Size|device|dtype|Tensor)"
    r"|torch\.(bool|b?float\w*|double|half|u?int\w*|short|long|complex\w*)"
    r"|torch\.storage\.\w+Storage|torch\.nn\.parameter\.Parameter|torch\.serialization\._get_layout"
    r"|torch\._utils\._rebuild_(tensor|tensor_v2|tensor_v3|parameter)|torch\._tensor\._rebuild_from_type_v2"
)
_LEGACY = 0x1950A86A20F9469CFC6C  # the number that torch's files began with before they were zips
_DAMAGE = (OSError, ValueError, EOFError, LookupError, RuntimeError, MemoryError, ArithmeticError)
_DAMAGE += (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    safetensors.SafetensorError,
    pickle.UnpicklingError,
    tarfile.TarError,
)


class Checkpoint(NamedTuple):
    """The content of a file."""

    tensors: dict[str, np.ndarray]  # by dotted name, some of them views of the file
    metadata: dict[str, str]  # of a safetensors file
    digest: str  # the file's sha256
    source: str  # the file's name without folders, or its address on the hub
    config: dict[str, Any]  # the config.json beside it, or {}
    preprocessor: dict[str, Any]  # the preprocessor_config.json beside it, or {}


def read_checkpoint(checkpoint: str | Path) -> Checkpoint:
    """A file of weights, from a path or from the hub as `hf:OWNER/NAME[@REVISION][:FILE]`.

    Raises:
      InputError: if the file is missing, of another kind, damaged, too large, wants to run code, or needs a
        package that is not there; for hub files also if they cannot be had, or differ from the checksum that
        the hub gives. Such a file is removed from the cache.
    """
    if str(checkpoint).startswith("hf:"):
        return _read_hub(str(checkpoint))
    path = Path(checkpoint)
    return _read(path, path.name, path.name in ("model.safetensors", "pytorch_model.bin"))


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """All tensors of a file, by dotted name, and a safetensors file's metadata ({} of others).

    Raises:
      InputError: as `read`.
    """
    if not path.is_file():
        raise InputError(f"checkpoint: no file {str(path)!r}")
    if path.suffix not in SUFFIXES:
        raise InputError(
            f"checkpoint: {str(path)!r} has suffix {path.suffix!r}; valid: {', '.join(SUFFIXES)}"
        )
    if path.stat().st_size > FILE_LIMIT:
        raise InputError(f"checkpoint: {str(path)!r} is larger than {FILE_LIMIT >> 30} GiB")
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        return read_npz(path, ZIP_LIMIT) if path.suffix == ".npz" else _read_torch(path), {}
    except InputError:
        raise
    except _DAMAGE as error:
        raise InputError(
            f"checkpoint: {str(path)!r} is damaged or not what its name says: {reason(error)}"
        ) from None


def imports(stream: io.BufferedIOBase) -> list[str]:
    """The dotted names that a pickle would import, from its opcodes, which are not run.

    "?" stands for a name that opcodes alone do not show.

    Raises:
      ValueError: if the stream is no pickle.
    """
    names: list[str] = []
    # the stack, None for anything but text: STACK_GLOBAL takes the last two
    strings: list[str | None] = []
    memo: dict[int, str | None] = {}
    # pyrefly: ignore[bad-argument-type]  # what is read in bytes will do
    for opcode, argument, _ in pickletools.genops(stream):
        kind = opcode.name
        if kind in ("GLOBAL", "INST"):
            names.append(str(argument).replace(" ", "."))
        elif kind == "STACK_GLOBAL":
            names.append(".".join(part or "?" for part in strings[-2:]) or "?")
        elif kind.startswith("EXT"):
            names.append(f"copyreg extension {argument}")
        if kind == "MEMOIZE":
            memo[len(memo)] = strings[-1] if strings else None
        elif kind in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0)] = strings[-1] if strings else None
        elif kind in ("GET", "BINGET", "LONG_BINGET"):
            strings.append(memo.get(int(argument or 0)))
        elif kind not in ("PROTO", "FRAME", "MARK", "STOP"):
            strings.append(argument if isinstance(argument, str) else None)
    return names


# ---- one kind of file each ---------------------------------------------------------------------------------


def _read(path: Path, source: str, sidecars: bool) -> Checkpoint:
    tensors, metadata = read_tensors(path)
    config, preprocessor = (
        _json(path.with_name(f"{name}.json")) if sidecars else {}
        for name in ("config", "preprocessor_config")
    )
    return Checkpoint(tensors, metadata, sha256(path), source, config, preprocessor)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"checkpoint: {str(path)!r} is no JSON: {reason(error)}") from None
    if not isinstance(values, dict):
        raise InputError(f"checkpoint: {str(path)!r} holds no JSON object")
    return values


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safetensors.safe_open(path, "np") as file:  # this checks the header: sizes, offsets, no gaps
        metadata = file.metadata() or {}
    data = np.memmap(path, np.uint8, mode="r")
    start = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8:start]))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _TYPES:
            raise ValueError(f"{name} is of type {entry['dtype']}")
        begin, end = (start + offset for offset in entry["data_offsets"])
        tensors[name] = np.asarray(data[begin:end]).view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors, metadata


def _read_torch(path: Path) -> dict[str, np.ndarray]:
    zipped = zipfile.is_zipfile(path)
    for name in _zip_imports(path) if zipped else _legacy_imports(path):
        if not _HARMLESS.fullmatch(name):
            raise InputError(
                f"checkpoint: {str(path)!r} would run {name} when unpickled, so it is not loaded; "
                "save its state dict alone"
            )
    try:
        return read_torch_zip(path) if zipped else _read_legacy(path)
    except pickle.UnpicklingError as error:
        why = " ".join(str(error).split())
        why = (why.partition("WeightsUnpickler error: ")[2] or why)[:160]
        raise InputError(
            f"checkpoint: {str(path)!r} is not loaded, because {why}; save its state dict alone"
        ) from None


def _read_legacy(path: Path) -> dict[str, np.ndarray]:
    """A file of torch before version 1.6, by torch's own weights-only loader."""
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            f"checkpoint: {str(path)!r} is in the format of torch before 1.6: pip install 'fcljax[torch]', "
            "or convert it once with `fcljax convert` on a machine that has torch"
        )
    import torch

    with warnings.catch_warnings(), torch.serialization.safe_globals(_plumbing()):
        warnings.simplefilter("ignore")  # old files make torch warn about its own storages
        content = torch.load(path, map_location="cpu", weights_only=True)
    return {name: _numpy(name, tensor) for name, tensor in tensors_in("", content, torch.Tensor)}


def _zip_imports(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        check_members(archive, ZIP_LIMIT)
        # what is packed a thousandfold would take a thousand times as long to look through
        check_unpacked(archive, path.stat().st_size)
        pickles = [name for name in archive.namelist() if name.endswith(".pkl")]
        if not any(PurePosixPath(name).name == "data.pkl" for name in pickles):
            raise ValueError("it has no data.pkl")
        names = []
        for name in pickles:
            with archive.open(name) as member:
                names += imports(member)  # pyrefly: ignore[bad-argument-type]  # it is one: a ZipExtFile
        return names


def _legacy_imports(path: Path) -> list[str]:
    """Files before torch 1.6: pickles of magic number, version, system, content, storages' names; bytes."""
    with path.open("rb") as stream:
        numbers = [
            argument for opcode, argument, _ in pickletools.genops(stream) if opcode.name.startswith("LONG")
        ]
        if numbers == [_LEGACY]:
            return [name for _ in range(4) for name in imports(stream)]
        stream.seek(0)
        suspicious = [name for name in imports(stream) if not _HARMLESS.fullmatch(name)]
        if not suspicious:
            raise ValueError("it does not begin as torch's files do")
        return suspicious


def _plumbing() -> list[object]:
    """What the loader may build besides tensors: settings and learning rates of DINO, iBOT and MAE."""
    import _codecs

    scalar = np._core.multiarray.scalar
    types = [
        getattr(np.dtypes, name)
        for name in dir(np.dtypes)
        if name.endswith("DType") and not name.startswith("_")
    ]
    names = [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    return [argparse.Namespace, _codecs.encode, np.dtype, *types, *names]


def _numpy(name: str, tensor: Any) -> np.ndarray:
    """A tensor of torch; bfloat16 as float32."""
    import torch

    tensor = tensor.detach()
    if tensor.is_quantized or tensor.layout != torch.strided:
        raise ValueError(f"{name} is sparse or quantised")
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


# ---- the hub -----------------------------------------------------------------------------------------------


def _read_hub(spec: str) -> Checkpoint:
    found = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@([^:]+))?(?::(.+))?", spec)
    if not found:
        raise InputError(
            f"checkpoint: {spec!r} is not hf:OWNER/NAME, hf:OWNER/NAME@REVISION "
            "or hf:OWNER/NAME@REVISION:FILE"
        )
    repository, revision, name = found.groups()
    if name and PurePosixPath(name).suffix not in SUFFIXES:
        raise InputError(
            f"checkpoint: {spec!r} has suffix {PurePosixPath(name).suffix!r}; valid: {', '.join(SUFFIXES)}"
        )
    for candidate in (name,) if name else ("model.safetensors", "pytorch_model.bin"):
        path = _fetch(spec, repository, revision, candidate)
        if path is not None:
            break
    else:
        raise InputError(
            f"checkpoint: {spec!r} has no file {name or 'model.safetensors or pytorch_model.bin'}"
        )
    for sidecar in ("config.json", "preprocessor_config.json"):
        _fetch(spec, repository, revision, str(PurePosixPath(candidate).with_name(sidecar)))
    label = f"hf:{repository}" + (f"@{revision}" if revision else "") + f":{candidate}"
    return _read(path, label, sidecars=True)


def _fetch(spec: str, repository: str, revision: str | None, name: str) -> Path | None:
    """A file of the hub in the library's cache, verified; None if there is no such file."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise InputError(
            f"checkpoint: {spec!r} needs the hub's library: pip install 'fcljax[hub]', "
            "or give the path of a file"
        )
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    # The library reads these at import; a variable that is set later would be ignored.
    endpoint = os.environ.get("HF_ENDPOINT") or None
    cache = Path(os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE)
    known = huggingface_hub.try_to_load_from_cache(repository, name, cache, revision)
    before = _cached(cache, repository)
    try:
        path = Path(
            huggingface_hub.hf_hub_download(
                repository, name, revision=revision, cache_dir=cache, endpoint=endpoint
            )
        )
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError) and known is not huggingface_hub._CACHED_NO_EXIST:
            raise InputError(
                f"checkpoint: cannot reach the hub for {name!r} of {spec!r}, and the cache does not have it"
            ) from None
        return None
    except Exception as error:  # what the transport raises differs from version to version of the library
        _remove(_cached(cache, repository) - before)
        raise InputError(
            f"checkpoint: cannot get {name!r} of {spec!r} from the hub: {reason(error)}"
        ) from None
    blob = Path(os.path.abspath(path.parent / os.readlink(path))) if path.is_symlink() else path
    if re.fullmatch("[0-9a-f]{64}", blob.name) and sha256(path) != blob.name:
        _remove(_cached(cache, repository) - before | {path, blob})
        raise InputError(
            f"checkpoint: {name!r} of {spec!r} differs from the hub's checksum {blob.name}; "
            "it was removed, try again"
        )
    return path


def _cached(cache: Path, repository: str) -> set[Path]:
    """Everything that the cache has of a repository, locks included."""
    folders = [root / f"models--{repository.replace('/', '--')}" for root in (cache, cache / ".locks")]
    return {path for folder in folders for path in (folder, *folder.rglob("*"))}


def _remove(paths: set[Path]) -> None:
    """Delete files and links, and then the folders that they leave empty."""
    for path in paths:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
    for folder in sorted(
        paths | {parent for path in paths for parent in list(path.parents)[:3]}, reverse=True
    ):
        with contextlib.suppress(OSError):  # not empty, or not there
            folder.rmdir()
