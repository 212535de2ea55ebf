"""Several devices as one: a mesh with the axis `clients`, and how arrays are placed and
split on it.

Devices that share a client's batch lie along a second axis, `batch`: they run the same
clients, and the network alone divides its images among them (`models/microbatch.py`).

The devices may belong to several processes. Then each process runs this same program on
the same values, and jax connects the computations.
"""

import functools
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
# abstract meshes are for shapes: this machine need not have their devices
AnyMesh = Mesh | AbstractMesh
WHOLE = PartitionSpec()  # every device has the whole array
# Bytes of an array that a device collects from all devices at a time, 64 MiB: the array
# was divided because one device has no room for all of it.
COLLECTED = 2**26
# Accelerators divide arrays of the server from 64 MiB on. Smaller ones are whole on every
# device: a copy is cheap, and the server's step then exchanges nothing.
SHARED = 2**26


def abstract_mesh(devices: int, batch: int = 1) -> AbstractMesh:
    """Return a mesh of so many devices that this machine need not have; arguments as of
    `mesh_of`."""
    # jax's default, explicit axes, needs a sharding of every intermediate value
    auto = jax.sharding.AxisType.Auto
    if batch == 1:
        return AbstractMesh((devices,), (AXIS,), axis_types=(auto,))
    return AbstractMesh((devices // batch, batch), (AXIS, BATCH), axis_types=(auto, auto))


def with_batch(mesh: AnyMesh, batch: int) -> AnyMesh:
    """Return a mesh of the same devices; `batch` neighbours share a client's batches."""
    if isinstance(mesh, AbstractMesh):
        return abstract_mesh(mesh.size, batch)
    return mesh_of(list(mesh.devices.flat), batch)


def mesh_of(devices: Sequence[jax.Device], batch: int = 1) -> Mesh:
    """Return a mesh of these devices in one row.

    Args:
      devices: a multiple of `batch`.
      batch: neighbours that share the batches of a client; with 1 the mesh has one axis.
    """
    auto = jax.sharding.AxisType.Auto
    if batch == 1:
        return jax.make_mesh((len(devices),), (AXIS,), axis_types=(auto,), devices=devices)
    return Mesh(np.asarray(devices).reshape(-1, batch), (AXIS, BATCH), axis_types=(auto, auto))


def device_count(mesh: AnyMesh | None) -> int:
    """Return the number of devices that run different clients: all, unless some share a
    client's batch; 1 without a mesh."""
    if mesh is None:
        return 1
    return mesh.shape[AXIS]


def sharing_batch() -> int:
    """Return the number of devices that share the batch of the client that is being
    traced, inside `on_each`."""
    # under `shard_map` the axis has a size; elsewhere jax does not know its name
    try:
        return jax.lax.axis_size(BATCH)
    except NameError:  # one device, or no second axis
        return 1


def by_itself() -> bool:
    """Return whether what is being traced runs on each device by itself, inside `on_each`
    on a mesh."""
    try:
        return jax.lax.axis_size(AXIS) > 0
    except NameError:
        return False


def split(axis: int = 0) -> PartitionSpec:
    """Return the specification that divides an axis over the devices in order."""
    return PartitionSpec(*[None] * axis, AXIS)


def rows_on(mesh: AnyMesh | None, rows: int) -> int:
    """Return the number of rows of an array that the devices share evenly: `rows`,
    rounded up to a multiple of the devices."""
    devices = device_count(mesh)
    return -(-rows // devices) * devices


def put_shared(tree: Any, mesh: AnyMesh | None) -> Any:
    """Put arrays [N, ...] so that the devices have equal parts, in their order.

    The last row is repeated up to a multiple of the devices. Without a mesh, the arrays
    stay as they are.
    """
    if mesh is None:
        return tree

    def pad(array: Any) -> Any:
        # `shard_map` needs equal parts; the copies of the last row are never read
        missing = rows_on(mesh, len(array)) - len(array)
        if not missing:
            return array
        # jax pads an array on its device, numpy one on the host: nothing is copied across
        numpy = np
        if isinstance(array, jax.Array):
            numpy = jnp
        return numpy.concatenate([array, numpy.repeat(array[-1:], missing, axis=0)])

    return put(jax.tree.map(pad, tree), mesh, split())


def process_rows(mesh: AnyMesh | None, rows: int) -> np.ndarray:
    """Return the indices of the rows that this process's devices have of arrays [rows,
    ...] that the devices share (`put_shared`); without a mesh, of all rows."""
    if mesh is None:
        return np.arange(rows)
    indices = np.arange(rows_on(mesh, rows))
    parts = NamedSharding(mesh, split()).addressable_devices_indices_map(indices.shape).values()
    # padding rows are copies of the last one
    return np.unique(np.minimum(np.concatenate([indices[part] for part in parts]), rows - 1))


def process_part(tree: Any, chosen: np.ndarray) -> tuple[np.ndarray, Any]:
    """Return the chosen rows in this process's part of arrays that the devices share
    (`put_shared`).

    All processes together have every chosen row once.

    Args:
      tree: the arrays, leaves [at least rows, ...].
      chosen: mask [rows].

    Returns:
      Indices [n] of the rows, and the rows [n, ...] on the host.
    """

    def parts(array: jax.Array) -> list[Any]:
        # devices that share batches have copies of the same part
        originals = [part for part in array.addressable_shards if part.replica_id == 0]
        # jax does not promise an order of the shards
        return sorted(originals, key=lambda part: part.index[0].start or 0)

    leaf = jax.tree.leaves(tree)[0]
    # the arrays may end in padding rows (`put_shared`), which are never chosen
    is_chosen = np.zeros(len(leaf), bool)
    is_chosen[: len(chosen)] = chosen
    all_rows = np.arange(len(leaf))

    def chosen_rows(array: jax.Array) -> np.ndarray:
        # concatenate needs at least one array, and this process may have none
        no_rows = np.zeros((0, *array.shape[1:]), array.dtype)
        # on a CPU asarray is a view of the device's memory: only chosen rows are copied
        taken = [np.asarray(part.data)[is_chosen[part.index[0]]] for part in parts(array)]
        return np.concatenate([no_rows, *taken])

    index = np.concatenate([np.arange(0), *(all_rows[part.index[0]] for part in parts(leaf))])
    return index[is_chosen[index]], jax.tree.map(chosen_rows, tree)


def put_process_rows(
    tree: Any,
    index: np.ndarray,
    rows: int,
    mesh: AnyMesh | None,
) -> Any:
    """Put arrays [rows, ...] as `put_shared` does, where each process has the rows
    `index` of `process_rows` alone; leaves [n, ...]."""
    if mesh is None:
        return jax.device_put(tree)
    row_of_entry = np.minimum(np.arange(rows_on(mesh, rows)), rows - 1)
    sharding = NamedSharding(mesh, split())

    def put_leaf(leaf: Any) -> jax.Array:
        shape = (len(row_of_entry), *leaf.shape[1:])

        def read(entries: Any) -> Any:
            # `index` is sorted: the position of a row of the whole array in this
            # process's
            return leaf[np.searchsorted(index, row_of_entry[entries[0]])]

        return jax.make_array_from_callback(shape, sharding, read)

    return jax.tree.map(put_leaf, tree)


def put(tree: Any, mesh: AnyMesh | None, spec: PartitionSpec = WHOLE) -> Any:
    """Put arrays on the devices of the mesh, sharded by `spec`; without a mesh, on the
    first device.

    Arrays that are there already stay.
    """
    if mesh is None:
        return jax.device_put(tree)
    sharding = NamedSharding(mesh, spec)
    # all devices belong to this process
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: _from_every_process(x, sharding), tree)


def _from_every_process(x: Any, sharding: NamedSharding) -> jax.Array:
    """Put an array of which each of several processes has all.

    `jax.device_put` would do the same, but first compares each array over all processes.
    """
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        # callbacks return plain arrays, so keys are sent as their data
        data = _from_every_process(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def put_rows(
    array: np.ndarray,
    rows: np.ndarray,
    mesh: AnyMesh,
    spec: PartitionSpec,
) -> jax.Array:
    """Put `array[rows]` on the devices of the mesh, its first axis sharded by `spec`.

    A process reads only what its devices get.
    """
    shape = (len(rows), *array.shape[1:])

    def read(index: Any) -> np.ndarray:
        return np.asarray(array[rows[index[0]]])

    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), read)


def on_host(tree: Any) -> Any:
    """Return the arrays in numpy, in every process.

    Arrays whose parts lie in several processes are collected by all of them together,
    at most `COLLECTED` bytes at a time.
    """

    def numpy(leaf: Any) -> Any:
        if _is_readable(leaf):
            return jax.device_get(leaf)
        return collect(leaf)

    return jax.tree.map(numpy, tree)


def _is_readable(x: Any) -> bool:
    """Return whether this process can read all of an array."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def collect(x: jax.Array) -> np.ndarray:
    """Return an array of `put_shared` in numpy, in every process."""
    mesh = x.sharding.mesh  # pyrefly: ignore[missing-attribute]  # a NamedSharding
    devices = device_count(mesh)
    # in pieces, because a device may have no memory for the whole array beside its part
    part = x.shape[0] // devices
    rows = max(1, min(part, COLLECTED // max(1, x.nbytes // part)))

    def rows_of_all(rows_of_device: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.all_gather(jax.lax.dynamic_slice_in_dim(rows_of_device, start, rows), AXIS)

    read = jit(on_each(rows_of_all, mesh, (split(), WHOLE), WHOLE), mesh)
    host = np.empty((devices, part, *x.shape[1:]), x.dtype)
    for start in range(0, part, rows):
        # the last piece overlaps the one before it, so that all have one shape: one
        # compile
        start = min(start, part - rows)
        host[:, start : start + rows] = np.asarray(read(x, np.int32(start)))
    return host.reshape(x.shape)


def jit(
    function: Callable,
    mesh: AnyMesh | None,
    spec: Any = WHOLE,
    lean: bool = False,
    **options: Any,
) -> Callable:
    """Return `jax.jit` of a function whose outputs are sharded on the mesh by `spec`,
    one specification or a tree of them.

    Outputs are arguments of the next call. Left to XLA, their sharding could change from
    call to call, and each change would trace and compile the function again. `lean`: as of
    `compiler_options`.
    """
    out_shardings = None
    if mesh is not None:
        out_shardings = shardings(mesh, spec)
    xla_options = compiler_options(lean=lean)
    return jax.jit(function, out_shardings=out_shardings, compiler_options=xla_options, **options)


def shardings(mesh: AnyMesh, spec: Any) -> Any:
    """Return a tree of specifications as shardings on the mesh."""

    def is_spec(tree: Any) -> bool:
        return isinstance(tree, PartitionSpec)

    return jax.tree.map(functools.partial(NamedSharding, mesh), spec, is_leaf=is_spec)


def compiler_options(backend: str | None = None, lean: bool = False) -> dict[str, Any]:
    """Return XLA's options for outermost programs, without those that XLA_FLAGS names.

    On a CPU half of the time to compile is LLVM's. A fifth of that goes to optimisations
    that made no program faster here, and changed no bit of its results: they are off. On
    accelerators, values are rounded where the code rounds them. Else XLA would keep
    activations of type bfloat16 in float32 where it may, on GPUs in memory too.

    Args:
      backend: cpu, gpu or tpu; None: that of this process.
      lean: for programs of small networks, which take longer to compile than to run. On a
        CPU it chooses XLA's older emitters of fusions. The newer ones keep some megabytes
        for each kernel until a program is compiled, up to 0.7 GB in all, but make steps of
        a ViT-Ti and evaluations up to a tenth faster (docs/results/speed.md). On a GPU it
        keeps XLA from timing kernels to choose from, which on an H200 saves a first run a
        quarter of the time to compile and three fifths of the CPU's (docs/accelerators.md).
    """
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    backend = backend or jax.default_backend()
    if backend == "gpu" and lean:
        options |= {"xla_gpu_autotune_level": 0}
    if backend == "cpu":
        options = {"xla_backend_optimization_level": 1}
        # a jaxlib that does not know an option refuses to compile, and later ones may
        # drop it
        known = jaxlib.__version__.startswith("0.10.")
        if lean and known:
            options |= {"xla_cpu_use_fusion_emitters": False}
    # options of a program would override the user's flags, so those that are named are
    # left out
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}


def on_each(
    function: Callable,
    mesh: AnyMesh | None,
    in_specs: Any,
    out_specs: Any,
) -> Callable:
    """Return a function that every device calls with its part of the arguments; without
    a mesh, `function` itself."""
    if mesh is None:
        return function
    # check_vma would refuse values that are equal on all devices but not known to be
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def add_over_devices(x: jax.Array, mesh: AnyMesh) -> jax.Array:
    """Return the sum over all devices, inside `on_each`, in the order of the devices.

    The bits are the same however many processes the devices belong to: in each step one
    device contributes its value and all others zero, so that the order of its additions
    does not matter.
    """
    if x.dtype == bool:
        # psum has no sum of booleans; any device's True is one
        return add_over_devices(x.astype(jnp.int32), mesh) > 0
    this_device = jax.lax.axis_index(AXIS)

    def value_of(device: Any) -> jax.Array:
        return jax.lax.psum(jnp.where(this_device == device, x, jnp.zeros_like(x)), AXIS)

    def add(device: Any, total: jax.Array) -> jax.Array:
        return total + value_of(device)

    # starts with the first value: 0 + x would turn -0 into 0
    return jax.lax.fori_loop(1, device_count(mesh), add, value_of(0))


def in_order(tree: Any, mesh: AnyMesh | None) -> Any:
    """Return shared arrays for functions that add over their first axis, in jit.

    On CPUs every device gets all of them, so that sums over them have the same bits
    however many processes there are. On accelerators they stay shared, and XLA divides
    what is computed of them.
    """
    if mesh is None or not keeps_order(mesh):
        return tree
    # every device has all summands, and adds them in the order of one device
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, WHOLE))


def keeps_order(mesh: AnyMesh) -> bool:
    """Return whether sums have the same bits for any number of processes.

    They are on CPUs. An abstract mesh stands for accelerators.
    """
    return not isinstance(mesh, AbstractMesh) and mesh.devices.flat[0].platform == "cpu"


def server_specs(server: Any, mesh: AnyMesh | None) -> Any:
    """Return how the devices share a server's state, a specification for each array.

    On accelerators, arrays of `SHARED` bytes and more lie in equal parts if the devices
    can share their first axis, such as FPPL's prototypes of all clients. XLA divides
    what is computed of them.
    """
    devices = device_count(mesh)
    all_whole = mesh is None or keeps_order(mesh)

    def spec(array: Any) -> PartitionSpec:
        shape = jnp.shape(array)
        # rows that do not divide evenly would need padding, which would enter the
        # server's sums
        if all_whole or not shape or shape[0] % devices != 0:
            return WHOLE
        if math.prod(shape) * array.dtype.itemsize < SHARED:
            return WHOLE
        return split()

    return jax.tree.map(spec, server)


def put_server(server: Any, mesh: AnyMesh | None) -> Any:
    """Put a server's state on the mesh as `server_specs` says, if there is one."""
    if mesh is None:
        return server
    return jax.tree.map(lambda x, spec: put(x, mesh, spec), server, server_specs(server, mesh))


def take_rows(part: Any, index: jax.Array, mesh: AnyMesh | None) -> Any:
    """Return rows [n, ...] of arrays that the devices share, inside `on_each`; each
    device asks for its own.

    A request goes round all devices, and each fills in what it has: a device holds its
    part and one request at a time, never the whole arrays.

    Args:
      part: the device's part of the arrays, leaves [N / devices, ...]: equal parts, in the
        order of the devices.
      index: rows of the whole arrays [n], from 0 to N - 1.
      mesh: the devices; None: one, which has all rows.
    """
    if mesh is None or not jax.tree.leaves(part):
        return jax.tree.map(lambda leaf: leaf[index], part)

    def fill_in(request: Any, unused: Any) -> Any:
        index, rows = request
        on_device, place = _place_on_device(part, index)

        def filled(leaf: jax.Array, row: jax.Array) -> jax.Array:
            # [n] becomes [n, 1, ..], which broadcasts against rows [n, ...]
            mask = on_device.reshape(-1, *[1] * (leaf.ndim - 1))
            return jnp.where(mask, leaf[place], row)

        # the request keeps what other devices have filled in
        return (index, jax.tree.map(filled, part, rows)), unused

    empty_rows = jax.tree.map(lambda leaf: jnp.zeros((len(index), *leaf.shape[1:]), leaf.dtype), part)
    (_, rows), _ = _visit_devices((index, empty_rows), fill_in, (), mesh)
    return rows


def write_rows(part: Any, index: jax.Array, rows: Any, mesh: AnyMesh | None) -> Any:
    """Write rows [n, ...] of all devices to their indices in the whole arrays, inside
    `on_each`, and return the device's part.

    Indices beyond the end are ignored. The rows of each device go round all devices, as
    in `take_rows`.
    """

    def write(request: Any, part: Any) -> Any:
        index, rows = request
        place = index
        if mesh is not None:
            on_device, place = _place_on_device(part, index)
            # rows of other devices get an index beyond the end, and are dropped
            place = jnp.where(on_device, place, len(jax.tree.leaves(part)[0]))
        return request, jax.tree.map(lambda leaf, row: leaf.at[place].set(row, mode="drop"), part, rows)

    if not jax.tree.leaves(part):
        return part
    if mesh is None:
        return write((index, rows), part)[1]
    _, part = _visit_devices((index, rows), write, part, mesh)
    return part


def _place_on_device(part: Any, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return which of these rows the device has, and where in its part."""
    rows = len(jax.tree.leaves(part)[0])
    place = index - jax.lax.axis_index(AXIS) * rows
    # clipped, so that rows of other devices read something valid, which the mask drops
    return (place >= 0) & (place < rows), jnp.clip(place, 0, rows - 1)


def _visit_devices(
    request: Any,
    visit: Callable[[Any, Any], Any],
    part: Any,
    mesh: AnyMesh,
) -> Any:
    """Return (request, part) after each request has visited every device.

    visit(request, part) -> both, on the device that the request is at.
    """
    devices = device_count(mesh)
    # a ring: each request is back after as many steps as there are devices
    next_device = [(device, (device + 1) % devices) for device in range(devices)]

    def step(_: Any, both: Any) -> Any:
        request, part = visit(*both)
        return jax.lax.ppermute(request, AXIS, next_device), part

    return jax.lax.fori_loop(0, devices, step, (request, part))


def by_device(steps: int, devices: int, per_device: int) -> np.ndarray:
    """Return the order that puts values [steps * devices * per_device], of which every
    device takes `per_device` at every step, device by device."""
    order = np.arange(steps * devices * per_device).reshape(steps, devices, per_device)
    return order.transpose(1, 0, 2).reshape(-1)
