"""Convert trees of arrays to Flower's records and back: by name, with exact types,
checked on arrival."""

import io
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fcljax.errors import InputError, install_command, nearest, reason
from fcljax.files import atomic, open_regular

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
except ImportError:
    raise InputError(
        f"flwr: the package flwr is not installed; install it with: {install_command('flower')}"
    ) from None

from fcljax.types import PyTree

NUMPY = "numpy.ndarray"  # Flower's name of numpy's own file format
# bytes of an array's header, which gives its type and shape: numpy reads it by Python's
# parser, which a long text can crash
MAX_HEADER = 10_000
MOST_METRIC = 1e32  # the sum over a million clients is finite in float32

Shape = jax.ShapeDtypeStruct


def to_arrays(tree: PyTree) -> ArrayRecord:
    """Pack the leaves of a tree by their paths, such as ".part.classifier['kernel']"."""
    return ArrayRecord({name: _packed(leaf) for name, leaf in _named(tree).items()})


def from_arrays(record: ArrayRecord, like: PyTree, what: str) -> PyTree:
    """Unpack the tree of a record.

    Args:
      record: of `to_arrays`, from any sender.
      like: arrays or `jax.ShapeDtypeStruct` of the structure, shapes and types that it
        must have.
      what: the record's name, for messages.

    Raises:
      InputError: naming the array that is missing, not known, of another type or shape,
        or damaged.
    """
    expected = _named(like)
    _check_names(record, expected, what)
    leaves = [_unpacked(record[name], leaf, f"{what}: {name}") for name, leaf in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def to_metrics(tree: PyTree) -> MetricRecord:
    """Pack the scalars of a tree by their paths."""
    return MetricRecord({name: float(leaf) for name, leaf in _named(jax.device_get(tree)).items()})


def from_metrics(record: MetricRecord, like: PyTree, what: str) -> PyTree:
    """Unpack the tree of a record of `to_metrics`; arguments as of `from_arrays`.

    Raises:
      InputError: naming the number that is missing, not known, or no finite number.
    """
    expected = _named(like)
    _check_names(record, expected, what)
    # `not <=` in place of `>`: with NaN every comparison is false
    for name in expected:
        if not isinstance(record[name], int | float) or not abs(record[name]) <= MOST_METRIC:
            raise InputError(f"{what}: {name} is {record[name]!r}; expected a finite number")
    leaves = [np.asarray(record[name], leaf.dtype) for name, leaf in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def config(values: Mapping[str, int | float | str | bool | bytes | list]) -> ConfigRecord:
    """Return a record of plain values by name."""
    return ConfigRecord(dict(values))


def record_bytes(record: RecordDict) -> int:
    """Count the bytes of a message's content as Flower sends it: all records, arrays
    and chunks, with headers. Equal pieces are sent, and counted, once."""
    # by object id, which is a hash of the content: Flower sends each object once
    sizes = {}
    waiting = [record]
    while waiting:
        part = waiting.pop()
        sizes[part.object_id] = len(part.deflate())
        waiting += (part.children or {}).values()
    return sum(sizes.values())


def list_in(record: ConfigRecord, name: str) -> list:
    """Return a list in a record; empty where the record has none.

    Raises:
      InputError: if it is no list.
    """
    value = record.get(name, [])
    if not isinstance(value, list):
        raise InputError(f"{name}: {value!r} is not a list")
    return value


# ---- files -----------------------------------------------------------------------------


def save_records(path: Path, records: Mapping[str, ArrayRecord]) -> None:
    """Write records by name to a numpy file, which is replaced as a whole."""
    index = [
        (record_name, name, array.dtype, array.shape)
        for record_name, arrays in records.items()
        for name, array in arrays.items()
    ]
    data = [np.frombuffer(array.data, np.uint8) for arrays in records.values() for array in arrays.values()]
    # a state reveals training data, so no other user may read a folder made here
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # one file, replaced as a whole: a state and cached arrays of two rounds would not fit
    # together
    with atomic(path) as temporary:
        header = np.array(json.dumps({"records": list(records), "arrays": index}))
        np.savez(temporary, header, *data)


def load_records(path: Path) -> dict[str, ArrayRecord]:
    """Read the records of a file; none if there is no such file.

    Raises:
      InputError: for a damaged file.
    """
    if not path.exists():
        return {}
    try:
        with open_regular(path) as stream, np.load(stream, allow_pickle=False) as file:
            header = json.loads(str(file["arr_0"]))
            records = {name: ArrayRecord() for name in header["records"]}
            for i, (record_name, name, dtype, shape) in enumerate(header["arrays"], 1):
                records[record_name][name] = Array(dtype, tuple(shape), NUMPY, file[f"arr_{i}"].tobytes())
    # a damaged file may raise anything in the parsers of zip, npy and json
    except Exception as error:
        raise InputError(
            f"state-dir: {str(path)!r} is damaged: {reason(error)}; remove it to start again"
        ) from None
    return records


# ---- one array -------------------------------------------------------------------------


def _named(tree: PyTree) -> dict[str, PyTree]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _is_key(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _stored(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and numpy type by which an array is stored. Types that numpy's
    files do not support, such as bfloat16, are stored as unsigned integers with the
    same bits, and random keys as their data."""
    if _is_key(dtype):
        data = jax.eval_shape(jax.random.key_data, Shape(shape, dtype))
        return data.shape, np.dtype(data.dtype)
    numpy_type = np.dtype(dtype)
    return shape, numpy_type if numpy_type.isbuiltin == 1 else np.dtype(f"u{numpy_type.itemsize}")


def _packed(leaf: PyTree) -> Array:
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    # `view` needs contiguous memory, and ascontiguousarray gives a scalar an axis, which
    # reshape takes away again
    _, stored = _stored(leaf.shape, leaf.dtype)
    plain = np.asarray(jax.random.key_data(leaf) if _is_key(leaf.dtype) else leaf)
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(plain).reshape(plain.shape).view(stored), allow_pickle=False)
    return Array(str(leaf.dtype), tuple(leaf.shape), NUMPY, stream.getvalue())


def _unpacked(array: Array, like: PyTree, where: str) -> jax.Array:
    if array.dtype != str(like.dtype):
        raise InputError(f"{where} is {array.dtype!r}; expected {str(like.dtype)!r}")
    if tuple(array.shape) != tuple(like.shape):
        raise InputError(f"{where} has shape {list(array.shape)}; expected {list(like.shape)}")
    # the shape and type that we expect, never those that the sender claims
    plain = _plain(array, *_stored(tuple(like.shape), like.dtype), where)
    if _is_key(like.dtype):
        return jax.random.wrap_key_data(jnp.asarray(plain), impl=jax.random.key_impl(jax.random.key(0)))
    return jnp.asarray(plain.view(like.dtype))


def _plain(
    array: Array,
    shape: tuple[int, ...],
    dtype: np.dtype,
    where: str,
) -> np.ndarray:
    """Return the array in the bytes. Their header is read first, so that a wrong one
    allocates nothing."""
    stream = io.BytesIO(array.data)
    try:
        if array.stype != NUMPY or np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("it is not in numpy format")
        header = np.lib.format.read_array_header_1_0(stream, MAX_HEADER)
        if header != (shape, False, dtype):
            raise ValueError(f"it holds {header[2]} of shape {list(header[0])}")
        return np.frombuffer(array.data, dtype, offset=stream.tell()).reshape(shape)
    # numpy reads headers by Python's parser, which raises more than ValueError
    except Exception as error:
        raise InputError(f"{where} is damaged: {reason(error)}") from None


def _check_names(names: Collection[str], expected: Collection[str], what: str) -> None:
    for name in expected:
        if name not in names:
            raise InputError(f"{what}: {name} is missing")
    for name in names:
        if name not in expected:
            raise InputError(f"{what}: unknown array {name!r}; {nearest(name, expected)}")
