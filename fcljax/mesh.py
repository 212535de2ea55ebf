"""Several devices as one: a mesh with the axis `clients`, and how arrays are placed and split on it.

Devices that share a client's batch lie along a second axis, `batch`: they run the same clients, and the
network alone divides its images among them (`models/microbatch.py`).

The devices may belong to several processes. Then each process runs this same program on the same values, and
jax connects the computations.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "clients"
BATCH = "batch"
WHOLE = PartitionSpec()  # every device has all of it


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


def device_count(mesh: Mesh | None) -> int:
    """The number of devices that run clients of their own: all, unless some share a client's batch; one
    without a mesh."""
    return 1 if mesh is None else mesh.shape[AXIS]


def sharing_batch() -> int:
    """The number of devices that share the batch of the client that is being traced, inside `on_each`."""
    try:
        return jax.lax.axis_size(BATCH)
    except NameError:  # one device, or no second axis
        return 1


def split(axis: int = 0) -> PartitionSpec:
    """Every device has a part of this axis, in the order of the devices."""
    return PartitionSpec(*[None] * axis, AXIS)


def put(tree: Any, mesh: Mesh | None, spec: PartitionSpec = WHOLE) -> Any:
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


def put_rows(array: np.ndarray, rows: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """`array[rows]` on the devices of the mesh, its first axis sharded by `spec`. A process reads only what
    its devices get."""
    shape = (len(rows), *array.shape[1:])

    def read(index: Any) -> np.ndarray:
        return np.asarray(array[rows[index[0]]])

    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), read)


def jit(function: Callable, mesh: Mesh | None, spec: PartitionSpec = WHOLE, **options: Any) -> Callable:
    """`jax.jit` of a function whose outputs are sharded on the mesh by `spec`. They are arguments of the next
    call, and a function is traced again for arguments with another sharding."""
    placed = None if mesh is None else NamedSharding(mesh, spec)
    return jax.jit(function, out_shardings=placed, compiler_options=compiler_options(), **options)


def compiler_options() -> dict[str, Any]:
    """XLA's options for programs that are not called by other programs.

    On a CPU half of the time to compile is LLVM's, a fifth of which is for optimisations that made no
    program faster here, nor changed a bit of its results. A level that XLA_FLAGS names is kept.
    """
    level = "xla_backend_optimization_level"
    if jax.default_backend() != "cpu" or level in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {level: 1}


def on_each(function: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """`function`, called by every device with its part of the arguments; without a mesh, `function`
    itself."""
    if mesh is None:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def add_over_devices(x: jax.Array, mesh: Mesh) -> jax.Array:
    """The sum over all devices, inside `on_each`, in the order of the devices: the same bits however many
    processes they belong to. In each step one device contributes its value and all others zero, so that the
    order of its additions does not matter."""
    if x.dtype == bool:
        return add_over_devices(x.astype(jnp.int32), mesh) > 0
    mine = jax.lax.axis_index(AXIS)

    def of(device: Any) -> jax.Array:
        return jax.lax.psum(jnp.where(mine == device, x, jnp.zeros_like(x)), AXIS)

    return jax.lax.fori_loop(1, device_count(mesh), lambda device, total: total + of(device), of(0))


def by_device(steps: int, devices: int, each: int) -> np.ndarray:
    """The order that puts values [steps * devices * each], of which every device takes `each` at every step,
    device by device."""
    old = np.arange(steps * devices * each).reshape(steps, devices, each)
    return old.transpose(1, 0, 2).reshape(-1)
