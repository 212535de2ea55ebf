"""Several devices as one: a mesh under the axis `clients`, how arrays get there, and how rows are dealt.

The devices may belong to several processes. Each of them then runs this same program on the same values, and
jax joins what they compute.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "clients"
WHOLE = PartitionSpec()  # every device has all of it


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of these devices in one row."""
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=auto, devices=devices)


def size(mesh: Mesh | None) -> int:
    """How many devices work: one where there is no mesh."""
    return 1 if mesh is None else mesh.size


def split(axis: int = 0) -> PartitionSpec:
    """Every device has its part of this axis, in the order of the devices."""
    return PartitionSpec(*[None] * axis, AXIS)


def put(tree: Any, mesh: Mesh | None, spec: PartitionSpec = WHOLE) -> Any:
    """Arrays on the devices of the mesh, as `spec` says; on the first device without one. Arrays that are
    there already stay."""
    if mesh is None:
        return jax.device_put(tree)
    sharding = NamedSharding(mesh, spec)
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: _from_every_process(x, sharding), tree)


def _from_every_process(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array over several processes from what each of them holds as a whole. (`jax.device_put` would do the
    same, but compares each array over all processes first.)"""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x if x.sharding.is_equivalent_to(sharding, x.ndim) else jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _from_every_process(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def put_rows(array: np.ndarray, rows: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """`array[rows]` on the devices of the mesh, as `spec` says of its first axis. A process reads
    what its devices get."""
    shape = (len(rows), *array.shape[1:])
    read = lambda index: np.asarray(array[rows[index[0]]])
    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), read)


def jit(function: Callable, mesh: Mesh | None, spec: PartitionSpec = WHOLE, **options: Any) -> Callable:
    """`jax.jit` of a function whose outputs lie on the mesh as `spec` says: they are the next call's
    arguments, and where an argument lies is part of its type, for which a function is traced."""
    placed = None if mesh is None else NamedSharding(mesh, spec)
    return jax.jit(function, out_shardings=placed, **options)


def on_each(function: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """`function` as every device calls it with its part of the arguments; itself where there is no mesh."""
    if mesh is None:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def add_over_devices(x: jax.Array, mesh: Mesh) -> jax.Array:
    """The sum over all devices, inside of `on_each`, in the order of the devices: the same bits however many
    processes they belong to. To each step one device gives a number and all others zero, so that no order of
    its additions matters."""
    if x.dtype == bool:
        return add_over_devices(x.astype(jnp.int32), mesh) > 0
    mine = jax.lax.axis_index(AXIS)
    give = lambda device: jax.lax.psum(jnp.where(mine == device, x, jnp.zeros_like(x)), AXIS)
    first = give(0)
    return jax.lax.fori_loop(1, mesh.size, lambda device, total: total + give(device), first)


def by_device(steps: int, devices: int, each: int) -> np.ndarray:
    """The order in which values [steps * devices * each], of which every device takes `each` at every step,
    are split over the devices: all of the first device's come first."""
    old = np.arange(steps * devices * each).reshape(steps, devices, each)
    return old.transpose(1, 0, 2).reshape(-1)
