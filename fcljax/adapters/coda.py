"""CODA-Prompt: an image's prefixes are a sum of components, weighted by how they attend
to it (Smith et al., CVPR 2023), as in pMAE's release.

Each task has its own components: a prompt P, a key K and an attention vector A each. The
weight of a component is the cosine of (query times A) and K, without a softmax.
Components of the current task train, those of earlier tasks are constant, those of later
tasks are not used. Half of a prompt's tokens become keys, half values.
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

EPSILON = 1e-12  # least length of a vector that is a divisor


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
    """Prompts, keys and attention vectors of n components of each task.

    The shape is fixed: components of later tasks have their initial values. The trainable
    ones are those of the current task, without the axis of tasks.
    """

    prompt: Float[Array, "*tasks blocks n length width"]
    key: Float[Array, "*tasks blocks n width"]
    attention: Float[Array, "*tasks blocks n width"]


# empty where clients send all components
Cached: TypeAlias = Components | tuple[()]


def coda(options: CodaOptions, sizes: Sizes, network: Network) -> Adapter:
    """Return CODA-Prompt's adapter for a ViT.

    Raises:
      InputError: for fewer components than tasks, an odd length, or more blocks than the
        network has.
    """
    check_blocks("coda_blocks", options.coda_blocks, network)
    if options.coda_components < sizes.tasks:
        raise InputError(
            f"coda_components: {options.coda_components} are too few for {sizes.tasks} tasks; nearest: "
            f"{sizes.tasks}"
        )
    check_even("coda_length", options.coda_length)
    slots = Slots(Components._fields, whole=options.coda_upload == "all")
    task_components = options.coda_components // sizes.tasks

    def init(key: PRNGKeyArray, _frozen) -> Components:
        # Gram-Schmidt makes a task's draws orthogonal when the task begins (`open_task`)
        shape = (sizes.tasks, options.coda_blocks, task_components)
        prompt_key, key_key, attention_key = jax.random.split(key, 3)
        return Components(
            jax.random.normal(prompt_key, (*shape, options.coda_length, network.width)),
            jax.random.normal(key_key, (*shape, network.width)),
            jax.random.normal(attention_key, (*shape, network.width)),
        )

    def open_task(params: Components, task: Task) -> Components:
        # applied to prompts, keys and attentions alike, as in the release
        return jax.tree.map(lambda rows: orthogonal_start(rows, task.index), params)

    def cached(params: Components) -> Cached:
        if slots.whole:
            # all components are part of the payload
            return ()
        return params

    def all_components(
        cached: Cached, trainable: Components, task: Task, constant: bool = True
    ) -> Components:
        # the trainable parameters are those of all tasks where clients send all of them
        params = trainable
        if isinstance(cached, Components) and not slots.whole:
            params = cached
        return with_current(params, slots.counted(trainable, task), task, constant)

    def prompt(
        cached: Cached, trainable: Components, query: Array, task: Task, constant: bool = True
    ) -> Float[Array, "batch blocks length width"]:
        return combined(all_components(cached, trainable, task, constant), query, task)

    def inject(
        cached: Cached, trainable: Components, query: Array, task: Task, train: bool, _mask: Array
    ) -> Injection:
        # in the release a server that trains moves the components of earlier tasks too
        return prefix_injection(prompt(cached, trainable, query, task, constant=train))

    def loss(
        cached: Cached, trainable: Components, _query: Array, task: Task, _mask: Array
    ) -> Float[Array, ""]:
        components = all_components(cached, trainable, task)
        distances = [distance_from_orthonormal(rows, task.index) for rows in components]
        return options.coda_orthogonality * sum(distances, jnp.zeros(()))

    adapter = Adapter(
        init=init,
        trainable=slots.trainable,
        merge=slots.merge,
        inject=inject,
        prompt=prompt,
        queries=True,
        counted=slots.counted,
        lasting=slots.lasting,
        cached=cached,
    )
    if options.coda_orthogonality:
        adapter = adapter._replace(loss=loss)
    if options.coda_gram_schmidt:
        adapter = adapter._replace(open_task=open_task)
    return adapter


def with_current(
    params: Components,
    current: Components,
    task: Task,
    constant: bool,
) -> Components:
    """Return the components of all tasks, with `current` in place of this task's.

    The others are `constant`, or get a gradient.
    """

    def merge(leaf: Array, current_leaf: Array) -> Array:
        is_current = jnp.arange(len(leaf)) == task.index
        if constant:
            leaf = jax.lax.stop_gradient(leaf)
        # [tasks] against leaves [tasks, ...]
        is_current = is_current.reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(is_current, current_leaf, leaf)

    return jax.tree.map(merge, params, current)


def combined(
    params: Components, query: Float[Array, "batch width"], task: Task
) -> Float[Array, "batch blocks length width"]:
    """Return sum_k cos(q * A_k, K_k) P_k over the components of the tasks seen so far."""
    # weights of later tasks are 0: a slice up to the task would have no fixed shape
    seen = (jnp.arange(len(params.key)) <= task.index)[:, None, None]
    weight = jnp.where(seen, matches(params, query), 0.0)
    return exact_einsum("btmk,tmkld->bmld", weight, params.prompt)


def matches(params: Components, query: Float[Array, "batch width"]) -> Float[Array, "batch *tasks blocks n"]:
    """Return the weight cos(q * A_k, K_k) of each component for each image."""
    axes = tuple(range(1, params.key.ndim))
    # the product comes first, then the scaling to length 1 (CODA-Prompt, eq. 4)
    attended = unit(jnp.expand_dims(query, axes) * params.attention, EPSILON)
    return jnp.sum(attended * unit(params.key, EPSILON), axis=-1)


def orthogonal_start(
    rows: Float[Array, "tasks blocks n *shape"], task: Array
) -> Float[Array, "tasks blocks n *shape"]:
    """Orthonormalise the task's rows one after the other (Gram-Schmidt).

    A row loses its projections on all rows before it, those of earlier tasks included,
    and is scaled to length 1.
    """
    tasks, blocks, n = rows.shape[:3]
    # one matrix [tasks * n, width] per block, with the tasks in their order
    matrices = jnp.moveaxis(rows.reshape(tasks, blocks, n, -1), 1, 0)
    matrices = matrices.reshape(blocks, tasks * n, -1)

    def of_block(matrix: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
        def step(i: Array, matrix: Array) -> Array:
            row = task * n + i
            return matrix.at[row].set(orthogonal_row(matrix, row))

        return jax.lax.fori_loop(0, n, step, matrix)

    matrices = jax.vmap(of_block)(matrices).reshape(blocks, tasks, n, -1)
    return jnp.moveaxis(matrices, 0, 1).reshape(rows.shape)


def orthogonal_row(
    rows: Float[Array, "rows width"],
    index: Array,
) -> Float[Array, " width"]:
    """Return a row minus its projections on all rows before it, scaled to length 1."""
    squares = jnp.maximum(jnp.sum(rows**2, axis=1), EPSILON)
    # exact: errors of bfloat16 would add up over the rows
    projections = exact_matmul(rows, rows[index]) / squares
    is_before = jnp.arange(len(rows)) < index
    row = rows[index] - exact_matmul(jnp.where(is_before, projections, 0.0), rows)
    # a row within the span of earlier ones becomes 0, not noise of length 1
    return row / jnp.maximum(jnp.linalg.norm(row), EPSILON)


def distance_from_orthonormal(
    rows: Float[Array, "tasks blocks n *shape"],
    task: Array,
) -> Float[Array, ""]:
    """Return the mean square of X X^T - I over rows X of seen tasks, summed over blocks."""
    tasks, blocks, n = rows.shape[:3]
    matrices = jnp.moveaxis(rows, 1, 0).reshape(blocks, tasks * n, -1)
    seen = jnp.repeat(jnp.arange(tasks) <= task, n)
    difference = exact_einsum("bnd,bmd->bnm", matrices, matrices) - jnp.eye(tasks * n)
    # a mean over the entries of seen rows, so that the penalty does not grow with the tasks
    return jnp.sum(difference**2, where=seen[:, None] & seen) / jnp.sum(seen) ** 2
