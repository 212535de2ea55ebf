"""Read files of weights as named arrays: safetensors, npz, torch's files, flax's
msgpack, the hub.

The content of a file shows its kind; the suffix decides only if the content does not.

No code in a file is ever executed. safetensors, npz and msgpack hold none. A torch file
is a pickle: its opcodes are checked first, without running them, and then a reader that
knows only tensors and plain containers reads it (`torch_zip.py`). Files before torch
1.6 are no zips and need torch's weights-only loader (`fcljax[torch]`).
"""

import argparse
import contextlib
import hashlib
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
import msgpack
import numpy as np
import safetensors
from flax import serialization

from fcljax.archives import check_members, read_npz, sha256
from fcljax.errors import InputError, install_command, reason
from fcljax.models.weights.torch_zip import check_unpacked, read_torch_zip, tensors_in

# MoCo's authors name their files .pth.tar
TORCH = (".pth", ".pt", ".bin", ".ckpt", ".th", ".tar")
SUFFIXES = (".safetensors", ".npz", ".msgpack", *TORCH)
# Files of weights in a folder or a repository of the hub. The first that exists is
# read, and safetensors come first because they can hold no code.
USUAL_FILES = ("model.safetensors", "pytorch_model.bin")
# indices of a network in several files
INDICES = tuple(f"{name}.index.json" for name in USUAL_FILES)
OTHER_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin", "flax_model.msgpack")
WEIGHT_FILES = (*USUAL_FILES, *INDICES, *OTHER_FILES)
SIDECARS = ("config.json", "preprocessor_config.json", "open_clip_config.json", "1_Pooling/config.json")
TOKENIZER = "tokenizer.json"
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

# Names in the pickles of state dicts, optimisers and numpy's scalars. Calling any of them
# only makes an object.
_HARMLESS = re.compile(
    r"collections\.(OrderedDict|Counter)|argparse\.Namespace|_codecs\.encode"
    r"|numpy\.(dtype|_?core\.multiarray\.scalar|dtypes\.\w+DType)"
    r"|torch\.(\w*Storage|Size|device|dtype|Tensor)"
    r"|torch\.(bool|b?float\w*|double|half|u?int\w*|short|long|complex\w*)"
    r"|torch\.storage\.\w+Storage|torch\.nn\.parameter\.Parameter|torch\.serialization\._get_layout"
    r"|torch\._utils\._rebuild_(tensor|tensor_v2|tensor_v3|parameter)|torch\._tensor\._rebuild_from_type_v2"
)
# the number that torch's files began with before they were zips
_LEGACY = 0x1950A86A20F9469CFC6C
_DAMAGE = (OSError, ValueError, EOFError, LookupError, RuntimeError, MemoryError, ArithmeticError)
_DAMAGE += (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    safetensors.SafetensorError,
    pickle.UnpicklingError,
    tarfile.TarError,
    msgpack.UnpackException,
)
# first bytes -> the kind of a file that is not read
_OTHER_KINDS = {
    b"\x89HDF\r\n": "an HDF5 file, as Keras writes them; save its weights as .npz",
    b"\x1f\x8b": "compressed by gzip; unpack it first",
    b"version https://git-lfs": "a pointer of Git LFS and not the file itself; get it with: git lfs pull",
    b"GGUF": "a GGUF file",
    b"<": "a page of HTML or XML; the download went wrong",
}


class Checkpoint(NamedTuple):
    """The content of a file."""

    tensors: dict[str, np.ndarray]  # by dotted name, some of them views of the file
    metadata: dict[str, str]  # of a safetensors file
    digest: str  # the file's sha256
    source: str  # the file's name without folders, or its address on the hub
    config: dict[str, Any]  # the config.json beside it, or {}
    preprocessor: dict[str, Any]  # the preprocessor_config.json beside it, or {}
    open_clip: dict[str, Any] = {}  # the open_clip_config.json beside it, or {}
    pooling: dict[str, Any] = {}  # the 1_Pooling/config.json beside it (sentence-transformers), or {}
    folder: Path | None = None  # that the file is in


def read_checkpoint(checkpoint: str | Path) -> Checkpoint:
    """Read a file of weights, from a path or from `hf:OWNER/NAME[@REVISION][:FILE]`.

    A path may also be a folder as transformers writes it, the index of a network in
    several files, or one of these files.

    Raises:
      InputError: if the file is missing, of another kind, damaged, too large, wants to
        run code, or needs a package that is not installed; for hub files also if they
        cannot be downloaded, or differ from the hub's checksum. Such a file is removed
        from the cache.
    """
    if str(checkpoint).startswith("hf:"):
        return _read_hub(str(checkpoint))
    path = Path(checkpoint)
    return _read(path, path.name)


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return all tensors of a file, by dotted name, and a safetensors file's metadata
    ({} of others).

    Raises:
      InputError: as `read_checkpoint`.
    """
    if not path.is_file():
        raise InputError(f"checkpoint: no file {str(path)!r}")
    if path.stat().st_size > FILE_LIMIT:
        raise InputError(f"checkpoint: {str(path)!r} is larger than {FILE_LIMIT >> 30} GiB")
    try:
        return _read_kind(path, _kind(path))
    except InputError:
        raise
    except _DAMAGE as error:
        raise InputError(
            f"checkpoint: {str(path)!r} is damaged or not of the type of its suffix: {reason(error)}"
        ) from None


def imports(stream: io.BufferedIOBase) -> list[str]:
    """List the dotted names that a pickle would import, without running it.

    "?" stands for a name that opcodes alone do not show.

    Raises:
      ValueError: if the stream is no pickle.
    """
    names: list[str] = []
    # The texts that opcodes have pushed, None for anything else: STACK_GLOBAL names
    # what it imports by the last two. Without running the pickle a text may be hidden,
    # hence the "?".
    stack: list[str | None] = []
    memo: dict[int, str | None] = {}
    # pyrefly: ignore[bad-argument-type]  # a stream of bytes will do
    for opcode, argument, _ in pickletools.genops(stream):
        code = opcode.name
        top = None
        if stack:
            top = stack[-1]
        if code in ("GLOBAL", "INST"):
            names.append(str(argument).replace(" ", "."))
        elif code == "STACK_GLOBAL":
            names.append(".".join(part or "?" for part in stack[-2:]) or "?")
        elif code.startswith("EXT"):
            names.append(f"copyreg extension {argument}")
        if code == "MEMOIZE":
            memo[len(memo)] = top
        elif code in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0)] = top
        elif code in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo.get(int(argument or 0)))
        elif code not in ("PROTO", "FRAME", "MARK", "STOP"):
            stack.append(argument if isinstance(argument, str) else None)
    return names


# ---- kinds of files --------------------------------------------------------------------


def _kind(path: Path) -> str:
    """Return the kind of a file: .safetensors, .npz, .msgpack or .pth by its content,
    else its suffix.

    Raises:
      InputError: if neither content nor suffix shows it.
      zipfile.BadZipFile: for half a zip.
    """
    with path.open("rb") as stream:
        start = stream.read(512)
    # safetensors begin with the length of a JSON header, in 8 bytes
    if start[8:9] == b"{":
        return ".safetensors"
    # a zip: torch's and numpy's have entries of other kinds
    if start.startswith(b"PK"):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith(".pkl") for name in names):
            return ".pth"
        if any(name.endswith(".npy") for name in names):
            return ".npz"
        return ".pth"
    # a pickle's first opcode; it is also msgpack's empty map, which holds no weights
    if start.startswith(b"\x80"):
        return ".pth"
    if start[257:262] == b"ustar":
        raise ValueError("it is a tar archive; unpack it first")
    for beginning, what in _OTHER_KINDS.items():
        if start.lstrip().startswith(beginning):
            raise ValueError(f"it is {what}")
    # msgpack's maps: of 1 to 15 entries, or with their number in 2 or 4 bytes
    if start[:1] and (0x81 <= start[0] <= 0x8F or start[0] in (0xDE, 0xDF)):
        return ".msgpack"
    if path.suffix in SUFFIXES:
        return path.suffix
    raise InputError(
        f"checkpoint: {str(path)!r} is not a file of weights in a known format: its content is unknown, "
        f"and it has suffix {path.suffix!r}; valid: {', '.join(SUFFIXES)}"
    )


def _read_kind(path: Path, kind: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    if kind == ".safetensors":
        return _read_safetensors(path)
    if kind == ".npz":
        return read_npz(path, ZIP_LIMIT), {}
    if kind == ".msgpack":
        return _read_msgpack(path), {}
    return _read_torch(path), {}


def _read(path: Path, source: str) -> Checkpoint:
    """Read a file, a folder or a network in shards, and the JSON files beside it."""
    if path.is_dir():
        path = _weight_file(path)
    index = _index_of(path)
    sidecars = [_read_json(path.parent / name) for name in SIDECARS]
    if index is not None:
        tensors, metadata, digest = _read_shards(index)
    else:
        tensors, metadata = read_tensors(path)
        digest = sha256(path)
    return Checkpoint(tensors, metadata, digest, source, *sidecars, folder=path.parent)


def _weight_file(folder: Path) -> Path:
    """Return the file of weights in a folder, by the names that libraries give.

    Raises:
      InputError: if there is none.
    """
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
    if (folder / "_CHECKPOINT_METADATA").exists() or (folder / "manifest.ocdbt").exists():
        raise InputError(
            f"checkpoint: {str(folder)!r} is a checkpoint of orbax, which is not read here; write its "
            "parameters with flax.serialization.to_bytes, as .msgpack"
        )
    names = ", ".join(WEIGHT_FILES)
    raise InputError(f"checkpoint: no file {str(folder)!r}, and no {names} in that folder")


def _index_of(path: Path) -> Path | None:
    """Return the index that lists this shard, or the file if it is an index."""
    if path.name.endswith(".index.json"):
        return path
    shard = re.fullmatch(r"(.+)-\d{5}-of-\d{5}(\.\w+)", path.name)
    if shard is None:
        return None
    index = path.with_name(f"{shard[1]}{shard[2]}.index.json")
    if not index.is_file():
        return None
    return index


def _read_shards(index: Path) -> tuple[dict[str, np.ndarray], dict[str, str], str]:
    """Return the tensors of several files, the last one's metadata, and the sha256 of
    all digests in order.

    Raises:
      InputError: if it is no index, or if a file or a tensor is missing.
    """
    if not index.is_file():
        raise InputError(f"checkpoint: no file {str(index)!r}")
    shard_of = shard_names(_read_json(index), str(index))
    tensors: dict[str, np.ndarray] = {}
    metadata: dict[str, str] = {}
    digests = []
    for name in sorted(set(shard_of.values())):
        shard, metadata = read_tensors(index.with_name(name))
        missing = [key for key, file in shard_of.items() if file == name and key not in shard]
        if missing:
            raise InputError(
                f"checkpoint: {name!r} has no {missing[0]!r}, which {str(index)!r} says is there"
            )
        tensors |= shard
        digests.append(sha256(index.with_name(name)))
    return tensors, metadata, hashlib.sha256("\n".join(digests).encode()).hexdigest()


def shard_names(index: dict[str, Any], source: str) -> dict[str, str]:
    """Return the file of each tensor in the index of a network in several files.

    Raises:
      InputError: if it is no such index, or names a file in another folder.
    """
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise InputError(f"checkpoint: {source!r} is not an index of a network's files: it has no weight_map")
    for name in weights.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*", name):
            raise InputError(
                f"checkpoint: {source!r} names the file {str(name)[:80]!r}, which is not beside it"
            )
    return weights


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"checkpoint: {str(path)!r} is not JSON: {reason(error)}") from None
    if not isinstance(values, dict):
        raise InputError(f"checkpoint: {str(path)!r} holds no JSON object")
    return values


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    # for its checks of the header: sizes, offsets, no gaps. The arrays below are views of
    # the mapped file, of bfloat16 too.
    with safetensors.safe_open(path, "np") as file:
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


def _read_msgpack(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file of `flax.serialization`, by names with slashes."""
    try:
        content = serialization.msgpack_restore(path.read_bytes())
    except (TypeError, AttributeError, AssertionError) as error:
        # flax raises these for malformed arrays
        raise ValueError(f"its msgpack cannot be decoded: {error}") from error
    return {name: np.asarray(x) for name, x in tensors_in("", content, np.ndarray, "/")}


def _read_torch(path: Path) -> dict[str, np.ndarray]:
    zipped = zipfile.is_zipfile(path)
    imports_of = _legacy_imports
    if zipped:
        imports_of = _zip_imports
    for name in imports_of(path):
        if not _HARMLESS.fullmatch(name):
            raise InputError(
                f"checkpoint: {str(path)!r} would run {name} when unpickled, so it is not loaded; "
                "save its state dict alone"
            )
    try:
        if zipped:
            return read_torch_zip(path)
        return _read_legacy(path)
    except pickle.UnpicklingError as error:
        why = " ".join(str(error).split())
        why = (why.partition("WeightsUnpickler error: ")[2] or why)[:160]
        raise InputError(
            f"checkpoint: {str(path)!r} is not loaded, because {why}; save its state dict alone"
        ) from None


def _read_legacy(path: Path) -> dict[str, np.ndarray]:
    """Read a file of torch before version 1.6 with torch's weights-only loader."""
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            f"checkpoint: {str(path)!r} is in the format of torch before 1.6: {install_command('torch')}, "
            "or convert it once with `fcljax convert` on a machine that has torch"
        )
    import torch

    with warnings.catch_warnings(), torch.serialization.safe_globals(_safe_globals()):
        # torch warns about its own old storages
        warnings.simplefilter("ignore")
        content = torch.load(path, map_location="cpu", weights_only=True)
    return {name: _numpy(name, tensor) for name, tensor in tensors_in("", content, torch.Tensor)}


def _zip_imports(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        check_members(archive, ZIP_LIMIT)
        # before the pickles are read: a bomb unpacks to a thousand times its size, and
        # would take a thousand times as long to check
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
    """List the imports of a file before torch 1.6.

    It is a row of pickles (magic number, version, system, content, names of storages),
    then bytes.
    """
    with path.open("rb") as stream:
        numbers = [
            argument for opcode, argument, _ in pickletools.genops(stream) if opcode.name.startswith("LONG")
        ]
        if numbers == [_LEGACY]:
            return [name for _pickle in range(4) for name in imports(stream)]
        stream.seek(0)
        suspicious = [name for name in imports(stream) if not _HARMLESS.fullmatch(name)]
        if not suspicious:
            raise ValueError("it does not begin as torch's files do")
        return suspicious


def _safe_globals() -> list[object]:
    """Return what the loader may build besides tensors: settings and learning rates of
    DINO, iBOT and MAE."""
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
    """Convert a tensor of torch; bfloat16 becomes float32."""
    import torch

    tensor = tensor.detach()
    if tensor.is_quantized or tensor.layout != torch.strided:
        raise ValueError(f"{name} is sparse or quantised")
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.numpy()


# ---- the hub ---------------------------------------------------------------------------


def _read_hub(spec: str) -> Checkpoint:
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@([^:]+))?(?::(.+))?", spec)
    if not match:
        raise InputError(
            f"checkpoint: {spec!r} is not hf:OWNER/NAME, hf:OWNER/NAME@REVISION "
            "or hf:OWNER/NAME@REVISION:FILE"
        )
    repository, revision, name = match.groups()
    if name and PurePosixPath(name).suffix not in SUFFIXES:
        raise InputError(
            f"checkpoint: {spec!r} has suffix {PurePosixPath(name).suffix!r}; valid: {', '.join(SUFFIXES)}"
        )
    # as in a folder, the first usual file counts
    candidates = WEIGHT_FILES
    if name:
        candidates = (name,)
    for candidate in candidates:
        path = _fetch(spec, repository, revision, candidate)
        if path is not None:
            break
    else:
        raise InputError(f"checkpoint: {spec!r} has no file {name or ' or '.join(USUAL_FILES)}")
    if candidate in INDICES:
        for shard in sorted(set(shard_names(_read_json(path), spec).values())):
            if _fetch(spec, repository, revision, shard) is None:
                raise InputError(f"checkpoint: {spec!r} has no file {shard}, which its {candidate} names")
    # the library puts files of one revision into one folder, where `_read` finds them
    for sidecar in (*SIDECARS, TOKENIZER):
        _fetch(spec, repository, revision, str(PurePosixPath(candidate).parent / sidecar))
    version = ""
    if revision:
        version = f"@{revision}"
    return _read(path, f"hf:{repository}{version}:{candidate}")


def _fetch(spec: str, repository: str, revision: str | None, name: str) -> Path | None:
    """Download a file of the hub and verify it; None if there is no such file."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise InputError(
            f"checkpoint: {spec!r} needs the hub's library: {install_command('hub')}, "
            "or give the path of a file"
        )
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    # The library reads these variables when it is imported, so a change since would be
    # ignored.
    endpoint = os.environ.get("HF_ENDPOINT") or None
    cache = Path(os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE)
    cached = huggingface_hub.try_to_load_from_cache(repository, name, cache, revision)
    paths_before = _cached_paths(cache, repository)
    try:
        path = Path(
            huggingface_hub.hf_hub_download(
                repository, name, revision=revision, cache_dir=cache, endpoint=endpoint
            )
        )
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError) and cached is not huggingface_hub._CACHED_NO_EXIST:
            raise InputError(
                f"checkpoint: cannot reach the hub for {name!r} of {spec!r}, and the cache does not have it"
            ) from None
        return None
    # anything: the library's transport raises other errors in every version
    except Exception as error:
        _remove(_cached_paths(cache, repository) - paths_before)
        raise InputError(
            f"checkpoint: cannot get {name!r} of {spec!r} from the hub: {reason(error)}"
        ) from None
    # A snapshot's file is a link to a blob. Large files' blobs are called by their sha256;
    # those of small ones by git's sha1, which is not compared.
    blob = path
    if path.is_symlink():
        blob = Path(os.path.abspath(path.parent / os.readlink(path)))
    if re.fullmatch("[0-9a-f]{64}", blob.name) and sha256(path) != blob.name:
        _remove(_cached_paths(cache, repository) - paths_before | {path, blob})
        raise InputError(
            f"checkpoint: {name!r} of {spec!r} differs from the hub's checksum {blob.name}; "
            "it was removed, try again"
        )
    return path


def _cached_paths(cache: Path, repository: str) -> set[Path]:
    """Return all paths of a repository in the cache, locks included."""
    folders = [root / f"models--{repository.replace('/', '--')}" for root in (cache, cache / ".locks")]
    return {path for folder in folders for path in (folder, *folder.rglob("*"))}


def _remove(paths: set[Path]) -> None:
    """Delete files and links, then the folders that they leave empty."""
    for path in paths:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
    folders = paths | {parent for path in paths for parent in list(path.parents)[:3]}
    # in reverse order children come before their parents; rmdir refuses what is not empty
    for folder in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
