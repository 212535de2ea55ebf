"""A low-rank pair per task in a ViT's first blocks, and how the pairs of several tasks are combined.

PILoRA, section 4.1. The pairs of all tasks are one `Lora` whose leaves have leading axes [tasks, blocks]; the
pair of one task has leaves [blocks, ...]. A task is an index that may be traced: pairs of earlier tasks are
constants, pairs of later ones count as 0.
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
    key: PRNGKeyArray, tasks: int, blocks: int, rank: int, width: int, init: LoraInit = "kaiming_uniform"
) -> Lora:
    """All tasks' pairs: B = 0, A uniform in +-1/sqrt(width) (release) or normal (paper).

    The paper states no standard deviation; it is that of the uniform draw.

    Returns:
      A [tasks, blocks, rank, width] and B [tasks, blocks, width, rank] for queries and values.
    """
    bound = width**-0.5
    shape = (tasks, blocks, rank, width)

    def draw(key: PRNGKeyArray) -> Array:
        if init == "gaussian":
            return bound / 3**0.5 * jax.random.normal(key, shape)
        return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

    query, value = jax.random.split(key)
    zeros = jnp.zeros((tasks, blocks, width, rank))
    return Lora(draw(query), zeros, draw(value), zeros)


def pair_of(pairs: Lora, task: ArrayLike) -> Lora:
    """The pair of one task, leaves [blocks, ...]."""
    return jax.tree.map(lambda leaf: leaf[task], pairs)


def merge_pair(pairs: Lora, task: ArrayLike, pair: Lora) -> Lora:
    """All pairs, with that of one task replaced."""
    return jax.tree.map(lambda leaf, new: leaf.at[task].set(new), pairs, pair)


def summed(pairs: Lora | tuple[()], current: Lora, task: ArrayLike, rule: LoraRule) -> Lora:
    """The pair that stands for tasks 0..task; that of `task` is `current`, which alone gets a gradient.

    Args:
      pairs: leaves [tasks, blocks, ...]; not read by the rule "current", which may have ().
      current: the pair of the task, leaves [blocks, ...].
      task: t.
      rule: "sum" is the product of sums (sum_i B_i)(sum_i A_i) (PILoRA eq. 6). "current" is B_t A_t alone
        (the release's clients). "products" is sum_i B_i A_i, as one pair of rank tasks * rank (PILoRA eq. 5).
        "first" is B_0 A_0 (the model that the release evaluates).

    Returns:
      Leaves [blocks, R, width] and [blocks, width, R], R the rank, or tasks * rank for "products".
    """
    if rule == "current":
        return current
    slots = jax.tree.map(lambda old, new: _until(old, new, task), pairs, current)
    if rule == "products":
        along_rank = ("t m r d -> m (t r) d", "t m d r -> m d (t r)")
        return Lora(*(rearrange(leaf, along_rank[i % 2]) for i, leaf in enumerate(slots)))
    return jax.tree.map(lambda leaf: leaf[0] if rule == "first" else jnp.sum(leaf, axis=0), slots)


def lora_injection(pair: Lora) -> Injection:
    """Block m gets the low-rank updates [m, ...] of the pair."""
    return Injection(lora={block: pair_of(pair, block) for block in range(pair.a_q.shape[0])})


def _until(
    old: Float[Array, "tasks *rest"], new: Float[Array, "*rest"], task: ArrayLike
) -> Float[Array, "tasks *rest"]:
    index = jnp.arange(old.shape[0]).reshape(-1, *[1] * new.ndim)
    return jnp.where(index == task, new, jnp.where(index < task, jax.lax.stop_gradient(old), 0.0))


# ---- the adapter -------------------------------------------------------------------------------------------


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
    """Low-rank updates of queries and values: one pair for the whole stream, or one per task (PILoRA, 4.1).

    Args:
      options: resolved, no None.
      sizes: of the stream.
      network: a ViT.

    Raises:
      InputError: for more blocks with pairs than the network has.
    """
    check_blocks("lora_blocks", options.lora_blocks, network)
    one = options.lora_pairs == "one"
    local = options.local_lora
    evaluated = options.global_lora

    def index(task: Task) -> ArrayLike:
        return 0 if one else task.index

    def init(key: PRNGKeyArray, frozen) -> Lora:
        del frozen
        tasks = 1 if one else sizes.tasks
        blocks = options.lora_blocks
        rank = options.lora_rank
        return init_pairs(key, tasks, blocks, rank, network.width, options.lora_init)

    def trainable(params: Lora, task: Task) -> Lora:
        return pair_of(params, index(task))

    def merge(params: Lora, task: Task, trainable: Lora) -> Lora:
        return merge_pair(params, index(task), trainable)

    def cached(params: Lora) -> Lora | tuple[()]:
        """Where the current pair acts alone the orthogonality loss reads the A of earlier pairs, and no B."""
        if one:
            return ()
        # pyrefly: ignore[bad-argument-type]  # None is what clients do not need
        return params._replace(b_q=None, b_v=None) if local == "current" else params

    def inject(cached: Lora | tuple[()], trainable: Lora, query, task: Task, train: bool, mask) -> Injection:
        del query, mask
        rule = "current" if one else local if train else evaluated
        return lora_injection(summed(cached, trainable, index(task), rule))

    def lasting(trainable: Lora) -> Lora | tuple[()]:
        return trainable if one else ()

    return Adapter(
        init,
        trainable=trainable,
        merge=merge,
        cached=cached,
        inject=inject,
        rate=options.lora_lr,
        lasting=lasting,
    )
