"""Read untrusted parquet and arrow files.

The sizes that a file declares are compared with its bytes and with the memory before it
is read, and whatever the library raises becomes one line that names the file.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fcljax.errors import InputError, gib, reason
from fcljax.files import machine_memory

SUFFIXES = (".parquet", ".arrow")

# Compression lets a small file declare billions of rows, each of which would take
# memory. Beyond this number a file must have at least a byte for each row, as any set
# of images has.
_FEW_ROWS = 1 << 20
_ROW_BYTES = 256  # of memory for the label, name and position of a row
_VALUE_BYTES = 8  # least memory of a value
_END = b"\xff\xff\xff\xff\0\0\0\0"  # the mark at the end of an arrow stream
_BATCH = 128  # rows in memory at a time


class Table(NamedTuple):
    """One file."""

    path: Path
    name: str
    """Relative to the folder of the data set."""
    rows: int
    kinds: dict[str, str]
    """The type of each column."""
    plain: frozenset[str]
    """The columns of text and whole numbers."""
    levels: dict[str, str]
    """Of columns of lists of numbers: "byte", "int" or "float"."""
    features: dict[str, dict[str, Any]]
    """The hub's library's facts on the columns."""
    column: Callable[[str], Any]
    """All values of a column, as an arrow array."""
    cell: Callable[[str, int], Any]
    """cell(column, row) -> a value, read with its neighbours."""


def open_table(path: Path, name: str) -> Table:
    """Open a table of either kind.

    Raises:
      InputError: for a damaged file, one that declares more rows than it can contain, and
        a repeated column.
    """
    with _reading(path):
        table = _parquet(path, name) if path.suffix == ".parquet" else _arrow(path, name)
    most = max(_FEW_ROWS, path.stat().st_size)
    if table.rows > most:
        raise InputError(
            f"dataset: {str(path)!r} declares {table.rows:,} rows in {path.stat().st_size:,} bytes, less "
            "than one for each; it is damaged, or no set of images"
        )
    _check_memory(path, table.rows * _ROW_BYTES, f"{table.rows:,} rows")
    return table


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Report what the library raises as one line."""
    try:
        yield
    except InputError:
        raise
    # anything: pyarrow raises errors of many kinds on a damaged file
    except Exception as error:
        raise InputError(f"dataset: {str(path)!r} cannot be read ({reason(error)})") from error


def _check_memory(path: Path, need: int, what: str) -> None:
    limit = machine_memory() // 2
    if need > limit:
        raise InputError(
            f"dataset: {str(path)!r} declares {what}, which need {gib(need)} of memory; the limit is "
            f"{gib(limit)}"
        )


def values_of(table: Table, column: str) -> list[Any]:
    """Return all values of a column. Equal texts of a dictionary are one object.

    Raises:
      InputError: for a column that cannot be read.
    """
    with _reading(table.path):
        values: list[Any] = []
        for chunk in table.column(column).chunks:
            # by the dictionary's index, so that a million equal labels are one object
            if hasattr(chunk, "dictionary"):
                words = chunk.dictionary.to_pylist()
                values += [None if index is None else words[index] for index in chunk.indices.to_pylist()]
            else:
                values += chunk.to_pylist()
        return values


def _parquet(path: Path, name: str) -> Table:
    import pyarrow.parquet as pq

    schema = pq.read_schema(path)
    # text as a dictionary, so that equal labels of many rows are one object
    texts = [field.name for field in schema if str(field.type) in ("string", "large_string", "binary")]
    file = pq.ParquetFile(path, read_dictionary=texts)
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    sizes = [group.num_rows for group in groups]
    ends = np.cumsum(sizes)

    def check(column: str, indices: list[int]) -> None:
        """Compare the declared size of a column with the memory."""
        chunks = [groups[i].column(j) for i in indices for j in range(groups[i].num_columns)]
        chunks = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == column]
        values = sum(chunk.num_values for chunk in chunks)
        need = max(values * _VALUE_BYTES, sum(chunk.total_uncompressed_size for chunk in chunks))
        _check_memory(path, need, f"{values:,} values in the column {column!r}")

    def column(name: str) -> Any:
        check(name, list(range(len(groups))))
        return file.read(columns=[name]).column(name)

    # One open reader. Examples are decoded in the order of the file, so it goes
    # forwards, and rows are read once.
    @functools.lru_cache(maxsize=1)
    def cursor(name: str, index: int) -> _Cursor:
        check(name, [index])
        return _Cursor(file.iter_batches(_BATCH, row_groups=[index], columns=[name]))

    def cell(name: str, row: int) -> Any:
        with _reading(path):
            index = int(np.searchsorted(ends, row, side="right"))
            inside = row - int(ends[index]) + sizes[index]
            if inside < cursor(name, index).start:
                # a reader goes forwards only
                cursor.cache_clear()
            return cursor(name, index).value(inside)

    return _table(path, name, file.metadata.num_rows, file.schema_arrow, column, cell)


class _Cursor:
    """The values of one column of a row group, read forwards in batches.

    A whole group may be far larger in memory than in the file.
    """

    def __init__(self, batches: Iterator[Any]):
        self.batches = batches
        self.batch = next(batches)
        self.start = 0
        """First row of the batch."""

    def value(self, row: int) -> Any:
        """Return the value of a row, which must not be before the current batch."""
        while row >= self.start + self.batch.num_rows:
            self.start += self.batch.num_rows
            self.batch = next(self.batches)
        return self.batch.column(0)[row - self.start].as_py()


def _arrow(path: Path, name: str) -> Table:
    """Open a stream, as the hub's library writes it, or a file; its bytes are mapped."""
    import pyarrow as pa

    source = pa.memory_map(str(path))
    try:
        table = pa.ipc.open_stream(source).read_all()
        # pyarrow reads a truncated stream up to the cut, without an error
        source.seek(max(0, source.size() - len(_END)))
        if source.read() != _END:
            raise InputError(f"dataset: {str(path)!r} is cut off: it lacks the mark at the end of a stream")
    except pa.ArrowInvalid:
        table = pa.ipc.open_file(source).read_all()

    def column(name: str) -> Any:
        return table.column(name)

    def cell(name: str, row: int) -> Any:
        with _reading(path):
            return table.column(name)[row].as_py()

    return _table(path, name, table.num_rows, table.schema, column, cell)


def _table(path: Path, name: str, rows: int, schema: Any, column: Callable, cell: Callable) -> Table:
    duplicate = next(
        (column_name for column_name in schema.names if schema.names.count(column_name) > 1), None
    )
    if duplicate is not None:
        raise InputError(f"dataset: {str(path)!r} has the column {duplicate!r} twice")
    metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = metadata.get("info", {}).get("features", {})
    declared = {column_name: facts for column_name, facts in features.items() if isinstance(facts, dict)}
    kinds = {field.name: str(field.type) for field in schema}
    plain = frozenset(field.name for field in schema if _is_plain(field.type))
    levels = {field.name: level for field in schema if (level := _level(field.type))}
    return Table(path, name, rows, kinds, plain, levels, declared, column, cell)


def _is_plain(kind: Any) -> bool:
    """Check whether a type is text or integers."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return text or types.is_integer(kind) or types.is_boolean(kind)


def _level(kind: Any) -> str:
    """Return the kind of the numbers in lists of this type; "" for another type."""
    from pyarrow import types

    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return ""
    # an image is a list of rows, of pixels, of channels
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    if types.is_uint8(kind):
        return "byte"
    return "int" if types.is_integer(kind) else "float"
