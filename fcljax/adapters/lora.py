"""A low-rank pair per task in a ViT's first blocks, and the combination of several tasks'
pairs (PILoRA, section 4.1).

The pairs of all tasks are one `Lora` whose leaves have leading axes [tasks, blocks]; the
pair of one task has leaves [blocks, ...]. A task is an index that may be traced: pairs of
earlier tasks are constants, pairs of later ones count as 0.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PRNGKeyArray

from fcljax.models.vit import Injection, Lora, check_blocks
from fcljax.options import option
from fcljax.parts.learner import Adapter
from fcljax.types import LearningRate, Network, Sizes, Task

LoraInit = Literal["kaiming_uniform", "gaussian"]
LoraRule = Literal["sum", "current", "products", "first"]


def init_pairs(
    key: PRNGKeyArray,
    tasks: int,
    blocks: int,
    rank: int,
    width: int,
    init: LoraInit = "kaiming_uniform",
) -> Lora:
    """Return new pairs of all tasks: B = 0, A uniform in +-1/sqrt(width) (release) or
    normal.

    The paper's normal distribution has no stated standard deviation; here it is that of
    the uniform draw.

    Returns:
      A [tasks, blocks, rank, width] and B [tasks, blocks, width, rank] for queries and values.
    """
    # torch's uniform draw of a linear layer with `width` inputs, as in the release
    bound = width**-0.5
    shape = (tasks, blocks, rank, width)

    def draw(key: PRNGKeyArray) -> Array:
        if init == "gaussian":
            # a uniform draw in +-b has standard deviation b / sqrt(3)
            return bound / 3**0.5 * jax.random.normal(key, shape)
        return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

    query_key, value_key = jax.random.split(key)
    zeros = jnp.zeros((tasks, blocks, width, rank))
    return Lora(draw(query_key), zeros, draw(value_key), zeros)


def pair_of(pairs: Lora, task: ArrayLike) -> Lora:
    """Return the pair of one task, leaves [blocks, ...]."""
    return jax.tree.map(lambda leaf: leaf[task], pairs)


def merge_pair(pairs: Lora, task: ArrayLike, pair: Lora) -> Lora:
    """Return all pairs with that of one task replaced."""
    return jax.tree.map(lambda leaf, new: leaf.at[task].set(new), pairs, pair)


def summed(
    pairs: Lora | tuple[()],
    current: Lora,
    task: ArrayLike,
    rule: LoraRule,
) -> Lora:
    """Return one pair that acts like the pairs of tasks 0 to t together. Only that of task
    t gets a gradient.

    Args:
      pairs: leaves [tasks, blocks, ...]; may be () for the rule "current".
      current: the pair of task t, leaves [blocks, ...].
      task: t.
      rule: sum: the product of sums (sum_i B_i)(sum_i A_i) (PILoRA eq. 6); current:
        B_t A_t alone (the release's clients); products: sum_i B_i A_i, as one pair
        of rank tasks * rank (PILoRA eq. 5); first: B_0 A_0 (the model that the
        release evaluates).

    Returns:
      Leaves [blocks, R, width] and [blocks, width, R] for a rank R.
    """
    if rule == "current":
        return current
    slots: Lora = jax.tree.map(lambda old, new: _up_to(old, new, task), pairs, current)
    if rule == "products":
        # side by side along the rank: [B_0, B_1, ..] [A_0; A_1; ..] = sum_i B_i A_i
        return Lora(
            a_q=rearrange(slots.a_q, "t m r d -> m (t r) d"),
            b_q=rearrange(slots.b_q, "t m d r -> m d (t r)"),
            a_v=rearrange(slots.a_v, "t m r d -> m (t r) d"),
            b_v=rearrange(slots.b_v, "t m d r -> m d (t r)"),
        )
    if rule == "first":
        return pair_of(slots, 0)
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), slots)


def lora_injection(pair: Lora) -> Injection:
    """Return the injection of the pair, with the low-rank update [m, ...] in block m."""
    blocks = pair.a_q.shape[0]
    return Injection(lora={block: pair_of(pair, block) for block in range(blocks)})


def _up_to(
    old: Float[Array, "tasks *rest"], current: Float[Array, "*rest"], task: ArrayLike
) -> Float[Array, "tasks *rest"]:
    """Return a leaf with the current task's values, constants before it and 0 after it."""
    # [tasks, 1, ...], which broadcasts against the leaf
    index = jnp.arange(old.shape[0]).reshape(-1, *[1] * current.ndim)
    earlier = jnp.where(index < task, jax.lax.stop_gradient(old), 0.0)
    return jnp.where(index == task, current, earlier)


# ---- the adapter -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LoraOptions:
    """Options of the adapter `lora`."""

    lora_rank: int = 4
    """Rank r of the low-rank updates."""
    lora_blocks: int = 1
    """Number of blocks with low-rank updates, counted from the first."""
    lora_lr: LearningRate = option(1e-5, positive=True, learning_rate=True)
    """Learning rate of the LoRA pairs."""
    lora_pairs: Literal["task", "one"] = "task"
    """Use one LoRA pair per task, or one pair that all tasks train."""
    local_lora: Literal["sum", "current", "products"] = "sum"
    """LoRA pairs that act in a client's network."""
    global_lora: Literal["sum", "first", "products"] = "sum"
    """LoRA pairs that act in the evaluated network."""
    lora_init: LoraInit = "kaiming_uniform"
    """Initial distribution of A; B starts at 0."""


def lora(options: LoraOptions, sizes: Sizes, network: Network) -> Adapter:
    """Return the adapter of low-rank updates of queries and values (PILoRA, section 4.1).

    The network is a ViT.

    Raises:
      InputError: for more blocks with pairs than the network has.
    """
    check_blocks("lora_blocks", options.lora_blocks, network)
    one_pair = options.lora_pairs == "one"

    def index(task: Task) -> ArrayLike:
        if one_pair:
            return 0
        return task.index

    def init(key: PRNGKeyArray, _frozen) -> Lora:
        tasks = sizes.tasks
        if one_pair:
            tasks = 1
        blocks = options.lora_blocks
        rank = options.lora_rank
        return init_pairs(key, tasks, blocks, rank, network.width, options.lora_init)

    def trainable(params: Lora, task: Task) -> Lora:
        return pair_of(params, index(task))

    def merge(params: Lora, task: Task, trainable: Lora) -> Lora:
        return merge_pair(params, index(task), trainable)

    def cached(params: Lora) -> Lora | tuple[()]:
        if one_pair:
            return ()
        if options.local_lora == "current":
            # earlier pairs do not act in a client's network, but an orthogonality loss
            # reads their A
            # pyrefly: ignore[bad-argument-type]  # None is what clients do not need
            return params._replace(b_q=None, b_v=None)
        return params

    def inject(
        cached: Lora | tuple[()], trainable: Lora, _query, task: Task, train: bool, _mask
    ) -> Injection:
        rule = options.global_lora
        if train:
            rule = options.local_lora
        if one_pair:
            rule = "current"
        return lora_injection(summed(cached, trainable, index(task), rule))

    def lasting(trainable: Lora) -> Lora | tuple[()]:
        if one_pair:
            return trainable
        return ()

    return Adapter(
        init,
        trainable=trainable,
        merge=merge,
        cached=cached,
        inject=inject,
        rate=options.lora_lr,
        lasting=lasting,
    )
