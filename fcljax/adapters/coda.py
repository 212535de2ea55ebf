"""CODA-Prompt: an image's prefixes are a sum of components, weighted by how they attend to it (Smith et al.,
CVPR 2023), as in pMAE's release (specification 6.3).

Every task has its own components: a prompt P, a key K and an attention vector A each. The weight of a
component is the cosine of (query times A) and K, without a softmax. Components of the current task train,
those of earlier tasks are constant, those of later tasks are not used. Half of a prompt's tokens become keys,
half values.
"""

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fcljax.adapters.pool import check_even, prefix_injection
from fcljax.adapters.slots import Slots
from fcljax.errors import InputError
from fcljax.models.heads import unit
from fcljax.models.products import exact_einsum, exact_matmul
from fcljax.models.vit import Injection, check_blocks
from fcljax.options import option
from fcljax.parts.learner import Adapter
from fcljax.types import Network, Sizes, Task

EPSILON = 1e-12  # least length of a vector


@dataclasses.dataclass(frozen=True)
class CodaOptions:
    """Options of the adapter `coda`; the values are those of pMAE's release."""

    coda_components: int = 100
    """Number of components of all tasks together; each task gets equally many."""
    coda_length: int = option(8, least=2)
    """Tokens of a prompt, an even number; half are keys and half values."""
    coda_blocks: int = 5
    """Number of blocks with prompts, counted from the first."""
    coda_orthogonality: float = 0.0
    """Weight of the penalty that makes prompts, keys and attentions of all tasks seen
    orthonormal."""
    coda_gram_schmidt: bool = True
    """Initialise a task's components orthogonal to the earlier ones."""
    coda_upload: Literal["current", "all"] = "current"
    """Components that clients and server send: those of the current task, or of all
    tasks."""


PRESETS = {
    "intended": CodaOptions(),
    "paper": CodaOptions(),
    "released": CodaOptions(coda_upload="all"),
}


class Components(NamedTuple):
    """Prompts, keys and attention vectors of n components of each task; what trains are those of the current
    task, without the axis of tasks."""

    prompt: Float[Array, "*tasks blocks n length width"]
    key: Float[Array, "*tasks blocks n width"]
    attention: Float[Array, "*tasks blocks n width"]


Cached: TypeAlias = Components | tuple[()]  # empty where clients send all components


def coda(options: CodaOptions, sizes: Sizes, network: Network) -> Adapter:
    """CODA-Prompt's adapter.

    Args:
      options: resolved, no None.
      sizes: of the stream.
      network: a ViT.

    Raises:
      InputError: for fewer components than tasks, an odd length, or more blocks than the network has.
    """
    check_blocks("coda_blocks", options.coda_blocks, network)
    if options.coda_components < sizes.tasks:
        raise InputError(
            f"coda_components: {options.coda_components} are too few for {sizes.tasks} tasks; nearest: "
            f"{sizes.tasks}"
        )
    check_even("coda_length", options.coda_length)
    slots = Slots(Components._fields, whole=options.coda_upload == "all")
    each = options.coda_components // sizes.tasks

    def init(key: PRNGKeyArray, frozen) -> Components:
        """Normal values of every task, which Gram-Schmidt turns into its first values."""
        del frozen
        shape = (sizes.tasks, options.coda_blocks, each)
        keys = jax.random.split(key, 3)
        prompt = jax.random.normal(keys[0], (*shape, options.coda_length, network.width))
        return Components(prompt, *(jax.random.normal(k, (*shape, network.width)) for k in keys[1:]))

    def open_task(params: Components, task: Task) -> Components:
        return jax.tree.map(lambda x: orthogonal_start(x, task.index), params)

    def cached(params: Components) -> Cached:
        return () if slots.whole else params

    def all_components(
        cached: Cached, trainable: Components, task: Task, constant: bool = True
    ) -> Components:
        past = trainable if slots.whole or not isinstance(cached, Components) else cached
        return with_current(past, slots.counted(trainable, task), task, constant)

    def prompt(
        cached: Cached, trainable: Components, query: Array, task: Task, constant: bool = True
    ) -> Float[Array, "batch blocks length width"]:
        return combined(all_components(cached, trainable, task, constant), query, task)

    def inject(
        cached: Cached, trainable: Components, query: Array, task: Task, train: bool, mask: Array
    ) -> Injection:
        del mask
        # a server that trains as in evaluation trains all components that it has (release)
        return prefix_injection(prompt(cached, trainable, query, task, constant=train))

    def loss(
        cached: Cached, trainable: Components, query: Array, task: Task, mask: Array
    ) -> Float[Array, ""]:
        del query, mask
        every = all_components(cached, trainable, task)
        distances = [apart_from_orthonormal(x, task.index) for x in every]
        return options.coda_orthogonality * sum(distances, jnp.zeros(()))

    adapter = Adapter(
        init,
        trainable=slots.trainable,
        merge=slots.merge,
        inject=inject,
        prompt=prompt,
        loss=loss if options.coda_orthogonality else None,
        queries=True,
        counted=slots.counted,
        lasting=slots.lasting,
        cached=cached,
    )
    return adapter._replace(open_task=open_task) if options.coda_gram_schmidt else adapter


def with_current(params: Components, own: Components, task: Task, constant: bool) -> Components:
    """All components, those of the current task from `own`; the others are `constant` or get a gradient."""

    def merged(every: Array, mine: Array) -> Array:
        is_current = (jnp.arange(len(every)) == task.index).reshape(-1, *[1] * (every.ndim - 1))
        return jnp.where(is_current, mine, jax.lax.stop_gradient(every) if constant else every)

    return jax.tree.map(merged, params, own)


def combined(
    params: Components, query: Float[Array, "batch width"], task: Task
) -> Float[Array, "batch blocks length width"]:
    """sum_k cos(q * A_k, K_k) P_k over the components of the tasks seen so far."""
    seen = (jnp.arange(len(params.key)) <= task.index)[:, None, None]
    weight = jnp.where(seen, matches(params, query), 0.0)
    return exact_einsum("btmk,tmkld->bmld", weight, params.prompt)


def matches(params: Components, query: Float[Array, "batch width"]) -> Float[Array, "batch *tasks blocks n"]:
    """The weight cos(q * A_k, K_k) of each component for each image."""
    axes = tuple(range(1, params.key.ndim))
    attended = unit(jnp.expand_dims(query, axes) * params.attention, EPSILON)
    return jnp.sum(attended * unit(params.key, EPSILON), axis=-1)


def orthogonal_start(
    rows: Float[Array, "tasks blocks n *shape"], task: Array
) -> Float[Array, "tasks blocks n *shape"]:
    """The task's rows by Gram-Schmidt, one after the other: each draw minus its projections on all rows
    before it, those of earlier tasks included, as a vector of length 1."""
    tasks, blocks, each = rows.shape[:3]
    flat = jnp.moveaxis(rows.reshape(tasks, blocks, each, -1), 1, 0).reshape(blocks, tasks * each, -1)

    def of_block(flat: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
        def one(i: Array, flat: Array) -> Array:
            row = task * each + i
            return flat.at[row].set(rejected(flat, row))

        return jax.lax.fori_loop(0, each, one, flat)

    done = jax.vmap(of_block)(flat).reshape(blocks, tasks, each, -1)
    return jnp.moveaxis(done, 0, 1).reshape(rows.shape)


def rejected(rows: Float[Array, "rows width"], index: Array) -> Float[Array, " width"]:
    """A row minus its projections on all rows before it, as a vector of length 1."""
    before = jnp.arange(len(rows)) < index
    share = jnp.where(
        before, exact_matmul(rows, rows[index]) / jnp.maximum(jnp.sum(rows**2, axis=1), EPSILON), 0.0
    )
    row = rows[index] - exact_matmul(share, rows)
    return row / jnp.maximum(jnp.linalg.norm(row), EPSILON)


def apart_from_orthonormal(x: Float[Array, "tasks blocks n *shape"], task: Array) -> Float[Array, ""]:
    """The mean square of X X^T - I over the rows of the tasks seen so far, summed over the blocks."""
    tasks, blocks, each = x.shape[:3]
    rows = jnp.moveaxis(x, 1, 0).reshape(blocks, tasks * each, -1)
    seen = jnp.repeat(jnp.arange(tasks) <= task, each)
    apart = exact_einsum("bnd,bmd->bnm", rows, rows) - jnp.eye(tasks * each)
    return jnp.sum(apart**2, where=seen[:, None] & seen) / jnp.sum(seen) ** 2
