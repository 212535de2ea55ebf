"""Read torch's files since version 1.6 without torch: a zip with a pickle and the bytes
of every storage.

The unpickler knows only tensors and plain containers: one table has each name that it
may look up, and the objects that it builds have data and no behaviour.
"""

import collections
import io
import math
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

# entries and levels of nested dicts: pickled dicts that contain each other many times
# over take a few bytes, and would never be walked to the end
MOST_NODES = 100_000
MOST_DEPTH = 32
# Most unpacked bytes per byte of a file. torch compresses nothing, but several tensors
# may be views of one storage.
MOST_UNPACKED = 16

# torch's names of types -> numpy's; other types are refused
_TYPES = {
    "float64": np.float64,
    "double": np.float64,
    "float32": np.float32,
    "float": np.float32,
    "float16": np.float16,
    "half": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int64": np.int64,
    "long": np.int64,
    "int32": np.int32,
    "int": np.int32,
    "int16": np.int16,
    "short": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.bool_,
}
_STORAGES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
    "UntypedStorage": np.uint8,
}


class Storage(NamedTuple):
    """An array in the zip."""

    member: str  # its name in the zip
    dtype: np.dtype


class Tensor(NamedTuple):
    """A view of a storage, which is not yet read; offset and stride are in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Inert:
    """Stands for anything else in the pickle, such as settings of a training, and is
    never used."""

    def __new__(cls, *_args: object, **_kwargs: object) -> "Inert":
        return super().__new__(cls)

    def __call__(self, *_args: object) -> "Inert":
        return self

    def __setstate__(self, _state: object) -> None:
        pass


class _Type(NamedTuple):
    """The type of a storage or a tensor."""

    dtype: np.dtype


# Stand-ins of torch's functions. The arguments that they ignore are gradients, hooks and
# states.
def _tensor(
    storage: object,
    offset: Any,
    shape: Any,
    stride: Any,
    *_hooks: object,
) -> Tensor:
    sizes = (offset, *shape, *stride)
    if not isinstance(storage, Storage) or not all(type(x) is int and x >= 0 for x in sizes):
        raise pickle.UnpicklingError("a tensor is not described as torch does")
    return Tensor(storage, offset, tuple(shape), tuple(stride))


def _tensor_v3(
    storage: object,
    offset: Any,
    shape: Any,
    stride: Any,
    *others: object,
) -> Tensor:
    """Make a tensor of an untyped storage; the other arguments include the type."""
    tensor_type = next((x for x in others if isinstance(x, _Type)), None)
    if tensor_type is None or not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor of an untyped storage has no type")
    return _tensor(storage._replace(dtype=tensor_type.dtype), offset, shape, stride)


def _parameter(data: Any, *_hooks: object) -> Any:
    return data


def _from_type(function: Any, _type: object, args: Any, _state: object) -> Any:
    if function not in (_tensor, _tensor_v3, _parameter):
        raise pickle.UnpicklingError("a tensor of an unknown type")
    return function(*args)


def _table() -> dict[str, object]:
    """Return every name that a pickle may look up, with its stand-in."""
    names: dict[str, object] = {
        "collections.OrderedDict": collections.OrderedDict,
        "collections.Counter": collections.OrderedDict,
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor_v3,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._tensor._rebuild_from_type_v2": _from_type,
        "torch.Size": tuple,
    }
    inert = ("argparse.Namespace", "_codecs.encode", "numpy.dtype", "torch.device", "torch.dtype")
    inert += ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.serialization._get_layout")
    inert += tuple(f"numpy.{core}.multiarray.scalar" for core in ("core", "_core"))
    names |= dict.fromkeys(inert, Inert)
    names |= {f"torch.{name}": _Type(np.dtype(dtype)) for name, dtype in _TYPES.items()}
    for module in ("torch", "torch.storage"):
        names |= {f"{module}.{name}": _Type(np.dtype(dtype)) for name, dtype in _STORAGES.items()}
    return names


NAMES = _table()


# pickle's unpickler in Python: that in C does not let BUILD be overridden, which sets
# states
class _Reader(pickle._Unpickler):
    """Builds tensors and plain containers, and refuses any other name."""

    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name.startswith("numpy.dtypes.") and name.endswith("DType"):
            return Inert
        if full_name not in NAMES:
            raise pickle.UnpicklingError(
                f"it names {full_name}, which is neither a tensor nor a plain container"
            )
        return NAMES[full_name]

    def persistent_load(self, pid: Any) -> Storage:
        match pid:
            case ("storage", _Type(dtype), str(member), _, _):
                return Storage(member, dtype)
        raise pickle.UnpicklingError("a storage is not described as torch does")

    def load_build(self) -> None:
        """Drop a state: the objects here have none, and must not get one."""
        self.stack.pop()
        if not isinstance(self.stack[-1], Inert | collections.OrderedDict):
            raise pickle.UnpicklingError("it sets the state of an object without state")

    # pyrefly: ignore[bad-assignment]  # methods of this class, as pickle's are of its own
    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


def _load(content: bytes) -> object:
    try:
        return _Reader(io.BytesIO(content)).load()
    # a damaged pickle calls the stand-ins with arguments that make no sense
    except (TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"its pickle cannot be decoded: {error}") from error


def check_unpacked(archive: zipfile.ZipFile, size: int) -> None:
    """Check that a file of `size` bytes does not unpack to many times its size.

    Raises:
      ValueError: if it does.
    """
    if sum(info.file_size for info in archive.infolist()) > MOST_UNPACKED * size:
        raise ValueError(f"it unpacks to more than {MOST_UNPACKED} times its size")


def read_torch_zip(path: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a file, by dotted name.

    Raises:
      pickle.UnpicklingError: if the pickle names anything but tensors and plain containers.
      ValueError: if it is no such file, is cut off, or is of a big-endian machine.
    """
    with zipfile.ZipFile(path) as archive:
        pickles = [name for name in archive.namelist() if PurePosixPath(name).name == "data.pkl"]
        if len(pickles) != 1:
            raise ValueError("it has no data.pkl")
        folder = str(PurePosixPath(pickles[0]).parent)
        order = f"{folder}/byteorder"
        if order in archive.namelist() and archive.read(order) != b"little":
            raise ValueError("its byte order is that of another kind of machine")
        size = path.stat().st_size
        check_unpacked(archive, size)
        tensors = dict(tensors_in("", _load(archive.read(pickles[0])), Tensor))
        if sum(map(_bytes, tensors.values())) > MOST_UNPACKED * size:
            raise ValueError(f"its tensors have more than {MOST_UNPACKED} times the bytes of the file")
        return {
            name: _array(archive.read(f"{folder}/data/{tensor.storage.member}"), tensor)
            for name, tensor in tensors.items()
        }


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.storage.dtype.itemsize


def _array(storage: bytes, tensor: Tensor) -> np.ndarray:
    """Copy a tensor out of its storage; bfloat16 becomes float32, which has the same
    values."""
    data = np.frombuffer(storage, tensor.storage.dtype)
    last_index = tensor.offset
    last_index += sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
    # as_strided checks nothing: beyond the storage it would read other memory
    if 0 not in tensor.shape and last_index >= len(data):
        raise ValueError(f"storage {tensor.storage.member} is shorter than a tensor in it")
    if math.prod(tensor.shape) > len(data):
        raise ValueError(f"a tensor has more numbers than its storage {tensor.storage.member}")
    strides = tuple(data.dtype.itemsize * stride for stride in tensor.stride)
    view = np.lib.stride_tricks.as_strided(data[tensor.offset :], tensor.shape, strides)
    if data.dtype == ml_dtypes.bfloat16:
        return view.astype(np.float32)
    return view.copy()


def tensors_in(
    prefix: str,
    content: object,
    tensor: type,
    separator: str = ".",
) -> Iterator[tuple[str, Any]]:
    """Yield the values of type `tensor` in nested dicts, with joined names, except an
    optimiser's.

    Raises:
      ValueError: for dicts too deep or with too many entries.
    """
    # a stack of our own: Python's would overflow before the limit of levels is reported
    stack = [(prefix, content, 0)]
    nodes = 0
    while stack:
        name, value, depth = stack.pop()
        nodes += 1
        if nodes > MOST_NODES or depth > MOST_DEPTH:
            raise ValueError(f"it has more than {MOST_NODES:,} entries, or more than {MOST_DEPTH} levels")
        if isinstance(value, tensor):
            yield name, value
        elif isinstance(value, dict):
            # reversed, so that they are popped in the dict's order
            for key, child in reversed(value.items()):
                if isinstance(key, str) and key != "optimizer":
                    stack.append((f"{name}{separator}{key}" if name else key, child, depth + 1))
