"""Several devices as one: a mesh with the axis `clients`, and how arrays are placed and split on it.

Devices that share a client's batch lie along a second axis, `batch`: they run the same clients, and the
network alone divides its images among them (`models/microbatch.py`).

The devices may belong to several processes. Then each process runs this same program on the same values, and
jax connects the computations.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

AXIS = "clients"
BATCH = "batch"
AnyMesh = Mesh | AbstractMesh  # the latter for shapes alone: its devices need not be here
WHOLE = PartitionSpec()  # every device has all of it
COLLECTED = 2**26  # bytes on a device
SHARED = 2**26  # bytes of an array, from which on accelerators share it


def abstract_mesh(devices: int, batch: int = 1) -> AbstractMesh:
    """The mesh of so many devices that are not here, for shapes alone; arguments as of `mesh_of`."""
    auto = jax.sharding.AxisType.Auto
    if batch == 1:
        return AbstractMesh((devices,), (AXIS,), axis_types=(auto,))
    return AbstractMesh((devices // batch, batch), (AXIS, BATCH), axis_types=(auto, auto))


def with_batch(mesh: AnyMesh, batch: int) -> AnyMesh:
    """The mesh of the same devices of which `batch` neighbours share the batches of a client."""
    if isinstance(mesh, AbstractMesh):
        return abstract_mesh(mesh.size, batch)
    return mesh_of(list(mesh.devices.flat), batch)


def mesh_of(devices: Sequence[jax.Device], batch: int = 1) -> Mesh:
    """A mesh of these devices in one row.

    Args:
      devices: a multiple of `batch`.
      batch: neighbours that share the batches of a client; with 1 the mesh has one axis.
    """
    auto = jax.sharding.AxisType.Auto
    if batch == 1:
        return jax.make_mesh((len(devices),), (AXIS,), axis_types=(auto,), devices=devices)
    return Mesh(np.asarray(devices).reshape(-1, batch), (AXIS, BATCH), axis_types=(auto, auto))


def device_count(mesh: AnyMesh | None) -> int:
    """The number of devices that run clients of their own: all, unless some share a client's batch; one
    without a mesh."""
    return 1 if mesh is None else mesh.shape[AXIS]


def sharing_batch() -> int:
    """The number of devices that share the batch of the client that is being traced, inside `on_each`."""
    try:
        return jax.lax.axis_size(BATCH)
    except NameError:  # one device, or no second axis
        return 1


def by_itself() -> bool:
    """Whether what is being traced runs on each device by itself, inside `on_each` on a mesh."""
    try:
        return jax.lax.axis_size(AXIS) > 0
    except NameError:
        return False


def split(axis: int = 0) -> PartitionSpec:
    """Every device has a part of this axis, in the order of the devices."""
    return PartitionSpec(*[None] * axis, AXIS)


def rows_on(mesh: AnyMesh | None, rows: int) -> int:
    """The number of rows of an array that the devices share evenly: `rows`, and as few more as needed."""
    devices = device_count(mesh)
    return -(-rows // devices) * devices


def put_shared(tree: Any, mesh: AnyMesh | None) -> Any:
    """Arrays [N, ...] of which every device of the mesh has an equal part, in the order of the devices. The
    last row is repeated up to a multiple of the devices. Without a mesh, the arrays as they are."""
    if mesh is None:
        return tree

    def padded(x: Any) -> Any:
        missing = rows_on(mesh, len(x)) - len(x)
        of = jnp if isinstance(x, jax.Array) else np
        return of.concatenate([x, of.repeat(x[-1:], missing, axis=0)]) if missing else x

    return put(jax.tree.map(padded, tree), mesh, split())


def put(tree: Any, mesh: AnyMesh | None, spec: PartitionSpec = WHOLE) -> Any:
    """Arrays on the devices of the mesh, sharded by `spec`; without a mesh, on the first device. Arrays that
    are there already stay."""
    if mesh is None:
        return jax.device_put(tree)
    sharding = NamedSharding(mesh, spec)
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: _from_every_process(x, sharding), tree)


def _from_every_process(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array over several processes, each of which has all of it. (`jax.device_put` would do the same, but
    first compares each array over all processes.)"""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x if x.sharding.is_equivalent_to(sharding, x.ndim) else jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _from_every_process(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def own_rows(mesh: AnyMesh | None, rows: int) -> np.ndarray:
    """Indices of the rows that this process's devices have of arrays [rows, ...] that the devices share
    (`put_shared`); without a mesh, of all."""
    if mesh is None:
        return np.arange(rows)
    every = np.arange(rows_on(mesh, rows))
    parts = NamedSharding(mesh, split()).addressable_devices_indices_map(every.shape).values()
    return np.unique(np.minimum(np.concatenate([every[index] for index in parts]), rows - 1))


def own_part(tree: Any, rows: int) -> tuple[np.ndarray, Any]:
    """This process's part of arrays that the devices share (`put_shared`), as all processes together have
    every row once: indices [n] below `rows`, and these rows [n, ...] on the host."""

    def parts(x: jax.Array) -> list[Any]:
        first = [part for part in x.addressable_shards if part.replica_id == 0]
        return sorted(first, key=lambda part: part.index[0].start or 0)

    def joined(x: jax.Array) -> np.ndarray:
        return np.concatenate([np.zeros((0, *x.shape[1:]), x.dtype), *(part.data for part in parts(x))])

    leaf = jax.tree.leaves(tree)[0]
    index = np.concatenate([np.arange(0), *(np.arange(len(leaf))[part.index[0]] for part in parts(leaf))])
    return index[index < rows], jax.tree.map(lambda x: joined(x)[index < rows], tree)


def put_own(tree: Any, index: np.ndarray, rows: int, mesh: AnyMesh | None) -> Any:
    """Arrays [rows, ...] that the devices share as `put_shared` shares them, where each process has the rows
    `index` of `own_rows` alone; leaves [n, ...]."""
    if mesh is None:
        return tree
    last = np.minimum(np.arange(rows_on(mesh, rows)), rows - 1)
    sharding = NamedSharding(mesh, split())

    def one(x: Any) -> jax.Array:
        shape = (len(last), *x.shape[1:])
        return jax.make_array_from_callback(
            shape, sharding, lambda of: x[np.searchsorted(index, last[of[0]])]
        )

    return jax.tree.map(one, tree)


def put_rows(array: np.ndarray, rows: np.ndarray, mesh: AnyMesh, spec: PartitionSpec) -> jax.Array:
    """`array[rows]` on the devices of the mesh, its first axis sharded by `spec`. A process reads only what
    its devices get."""
    shape = (len(rows), *array.shape[1:])

    def read(index: Any) -> np.ndarray:
        return np.asarray(array[rows[index[0]]])

    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), read)


def on_host(tree: Any) -> Any:
    """The arrays in numpy, in every process. Those whose parts lie in several processes are collected by all
    of them together, at most `COLLECTED` bytes at a time."""
    return jax.tree.map(lambda x: jax.device_get(x) if _is_here(x) else collect(x), tree)


def _is_here(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def collect(x: jax.Array) -> np.ndarray:
    """An array of `put_shared` in numpy, in every process."""
    mesh = x.sharding.mesh  # pyrefly: ignore[missing-attribute]  # a NamedSharding
    devices = device_count(mesh)
    part = x.shape[0] // device_count(mesh)
    rows = max(1, min(part, COLLECTED // max(1, x.nbytes // part)))

    def some(mine: jax.Array, first: jax.Array) -> jax.Array:
        return jax.lax.all_gather(jax.lax.dynamic_slice_in_dim(mine, first, rows), AXIS)

    read = jit(on_each(some, mesh, (split(), WHOLE), WHOLE), mesh)
    host = np.empty((devices, part, *x.shape[1:]), x.dtype)
    for first in (min(first, part - rows) for first in range(0, part, rows)):
        host[:, first : first + rows] = np.asarray(read(x, np.int32(first)))
    return host.reshape(x.shape)


def jit(
    function: Callable, mesh: AnyMesh | None, spec: Any = WHOLE, lean: bool = False, **options: Any
) -> Callable:
    """`jax.jit` of a function whose outputs are sharded on the mesh by `spec`, a specification or a tree of
    them. They are arguments of the next call, and a function is traced again for arguments with another
    sharding. `lean`: as of `compiler_options`."""
    placed = None if mesh is None else shardings(mesh, spec)
    return jax.jit(function, out_shardings=placed, compiler_options=compiler_options(lean=lean), **options)


def shardings(mesh: AnyMesh, spec: Any) -> Any:
    """A tree of specifications as shardings on the mesh."""
    return jax.tree.map(
        lambda each: NamedSharding(mesh, each), spec, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def compiler_options(backend: str | None = None, lean: bool = False) -> dict[str, Any]:
    """XLA's options for programs that are not called by other programs, but for those that XLA_FLAGS names.

    On a CPU half of the time to compile is LLVM's, a fifth of which is for optimisations that made no program
    faster here, nor changed a bit of its results. On accelerators, what the code rounds between operations is
    rounded: else XLA keeps activations in float32 where it may, for GPUs in memory too.

    Args:
      backend: cpu, gpu or tpu; None: that of this process.
      lean: for programs of many kernels on a CPU. XLA's newer emitters of fusions keep some megabytes for
        each kernel until a program is compiled, up to 0.7 GB in all, and the older ones do not; but steps of
        a ViT-Ti and evaluations are up to a tenth slower with these (docs/results/speed.md).
    """
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if (backend or jax.default_backend()) == "cpu":
        options = {"xla_backend_optimization_level": 1}
        known = jaxlib.__version__.startswith("0.10.")  # later ones may refuse the option
        if lean and known:
            options |= {"xla_cpu_use_fusion_emitters": False}
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}


def on_each(function: Callable, mesh: AnyMesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """`function`, called by every device with its part of the arguments; without a mesh, `function`
    itself."""
    if mesh is None:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def add_over_devices(x: jax.Array, mesh: AnyMesh) -> jax.Array:
    """The sum over all devices, inside `on_each`, in the order of the devices: the same bits however many
    processes they belong to. In each step one device contributes its value and all others zero, so that the
    order of its additions does not matter."""
    if x.dtype == bool:
        return add_over_devices(x.astype(jnp.int32), mesh) > 0
    mine = jax.lax.axis_index(AXIS)

    def of(device: Any) -> jax.Array:
        return jax.lax.psum(jnp.where(mine == device, x, jnp.zeros_like(x)), AXIS)

    return jax.lax.fori_loop(1, device_count(mesh), lambda device, total: total + of(device), of(0))


def in_order(tree: Any, mesh: AnyMesh | None) -> Any:
    """Arrays that the devices share, as functions see them that add over their first axis, inside jit.

    On CPUs every device gets all of them, so that sums over them have the same bits however many processes
    there are. On accelerators they stay shared, and XLA divides what is computed of them.
    """
    if mesh is None or not keeps_order(mesh):
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, WHOLE))


def keeps_order(mesh: AnyMesh) -> bool:
    """Whether sums over arrays are the same bits however many processes the devices belong to: on CPUs. An
    abstract mesh stands for accelerators."""
    return not isinstance(mesh, AbstractMesh) and mesh.devices.flat[0].platform == "cpu"


def server_specs(server: Any, mesh: AnyMesh | None) -> Any:
    """How the devices have a server's state, a specification for each array.

    On accelerators, arrays of `SHARED` bytes and more lie in equal parts if the devices can share their first
    axis, such as FPPL's prototypes of all clients. XLA divides what is computed of them.
    """
    devices = device_count(mesh)
    whole = mesh is None or keeps_order(mesh)

    def spec(x: Any) -> PartitionSpec:
        shape = jnp.shape(x)
        size = x.dtype.itemsize
        divides = len(shape) > 0 and shape[0] % devices == 0 and math.prod(shape) * size >= SHARED
        return split() if divides and not whole else WHOLE

    return jax.tree.map(spec, server)


def put_server(server: Any, mesh: AnyMesh | None) -> Any:
    """A server's state as the devices have it; without a mesh, as it is."""
    if mesh is None:
        return server
    return jax.tree.map(lambda x, spec: put(x, mesh, spec), server, server_specs(server, mesh))


def take_rows(mine: Any, index: jax.Array, mesh: AnyMesh | None) -> Any:
    """Rows [n, ...] of arrays that the devices share, inside `on_each`; each device asks for its own.

    Args:
      mine: the device's part of the arrays, leaves [N / devices, ...].
      index: of rows, in the whole arrays; every one must be there.
      mesh: the devices; None: one, which has all rows.

    A request goes round all devices, and each fills in what it has: a device holds its own part and one
    request at a time, never the whole arrays.
    """
    if mesh is None or not jax.tree.leaves(mine):
        return jax.tree.map(lambda x: x[index], mine)

    def fill_in(request: Any, nothing: Any) -> Any:
        index, rows = request
        here, place = _here(mine, index)

        def filled(x: jax.Array, row: jax.Array) -> jax.Array:
            return jnp.where(here.reshape(-1, *[1] * (x.ndim - 1)), x[place], row)

        return (index, jax.tree.map(filled, mine, rows)), nothing

    empty = jax.tree.map(lambda x: jnp.zeros((len(index), *x.shape[1:]), x.dtype), mine)
    return _around((index, empty), fill_in, (), mesh)[0][1]


def write_rows(mine: Any, index: jax.Array, rows: Any, mesh: AnyMesh | None) -> Any:
    """The device's part of arrays that the devices share, with rows [n, ...] of all devices written to their
    indices in the whole arrays, inside `on_each`. Indices beyond the end are ignored.

    The rows of each device go round all devices, as in `take_rows`.
    """

    def write(sent: Any, mine: Any) -> Any:
        index, rows = sent
        place = index if mesh is None else jnp.where(*_here(mine, index), len(jax.tree.leaves(mine)[0]))
        return sent, jax.tree.map(lambda x, row: x.at[place].set(row, mode="drop"), mine, rows)

    if not jax.tree.leaves(mine):
        return mine
    if mesh is None:
        return write((index, rows), mine)[1]
    return _around((index, rows), write, mine, mesh)[1]


def _here(mine: Any, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which of these rows are in the device's part, and where there."""
    part = len(jax.tree.leaves(mine)[0])
    place = index - jax.lax.axis_index(AXIS) * part
    return (place >= 0) & (place < part), jnp.clip(place, 0, part - 1)


def _around(block: Any, visit: Callable[[Any, Any], Any], kept: Any, mesh: AnyMesh) -> Any:
    """(block, kept) after each device's block has visited every device and come home: visit(block, kept) ->
    both, on the device that the block is at."""
    devices = device_count(mesh)
    onwards = [(device, (device + 1) % devices) for device in range(devices)]

    def step(_: Any, both: Any) -> Any:
        block, kept = visit(*both)
        return jax.lax.ppermute(block, AXIS, onwards), kept

    return jax.lax.fori_loop(0, devices, step, (block, kept))


def by_device(steps: int, devices: int, each: int) -> np.ndarray:
    """The order that puts values [steps * devices * each], of which every device takes `each` at every step,
    device by device."""
    old = np.arange(steps * devices * each).reshape(steps, devices, each)
    return old.transpose(1, 0, 2).reshape(-1)
