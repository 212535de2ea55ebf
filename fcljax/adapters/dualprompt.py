"""DualPrompt: prefixes that all tasks share, and one of each task's own (Wang et al., ECCV 2022), as pMAE's
release has it (specification 6.2).

The shared ones (G) go into the first two blocks, the tasks' own (E) into the three after them. Training uses
the current task's E; evaluation, and a server that trains, take the E whose key is the nearest to most images
of the batch. Padding has no vote.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fcljax.adapters.l2p import choose, pull
from fcljax.models.heads import cosine, mask_logits
from fcljax.models.vit import Injection, Prefix, check_blocks
from fcljax.options import option
from fcljax.parts.learner import Adapter
from fcljax.types import Network, Sizes, Task


@dataclasses.dataclass(frozen=True)
class DualPromptOptions:
    """Options of the adapter `dualprompt`; the values are those of pMAE's release."""

    dual_shared_length: int = 5
    """Tokens of a shared prefix."""
    dual_length: int = 20
    """Tokens of a task's prefix."""
    dual_shared_blocks: int = 2
    """Number of blocks with shared prefixes, the first ones."""
    dual_blocks: int = 3
    """Number of blocks with a task's prefixes, after those with shared ones."""
    dual_key_weight: float = 0.1
    """Weight of the cosine similarity of the task's key and the query."""
    dual_batchwise: bool = True
    """Whether the images of a batch share their choice in evaluation."""
    dual_transfer: int = option(0, least=0)
    """Number of the last task, from 1, whose prefix starts as a copy of the one before; 0 for all tasks."""
    dual_reshape_bug: bool = False
    """Lay out a batch's prefixes wrongly, as the release does: keys in place of values for the first half of
    the images, values in place of keys for the second half."""
    dual_upload: Literal["current", "all"] = "current"
    """Prefixes and keys that clients and server send: the current task's, or those of all tasks."""
    dual_candidates: Literal["seen", "all"] = "seen"
    """Tasks that evaluation chooses from."""


PRESETS = {
    "intended": DualPromptOptions(),
    "paper": DualPromptOptions(dual_candidates="all"),
    "released": DualPromptOptions(
        dual_transfer=10, dual_reshape_bug=True, dual_upload="all", dual_candidates="all"
    ),
}


class DualPrompts(NamedTuple):
    """Prefixes as keys and values of each block, and the tasks' keys; as a part, `own` and `key` are those of
    the current task, [blocks, 2, length, width] and [width]."""

    shared: Float[Array, "blocks 2 length width"]
    own: Float[Array, "tasks blocks 2 length width"] | Float[Array, "blocks 2 length width"]
    key: Float[Array, "tasks width"] | Float[Array, " width"]


def dualprompt(options: DualPromptOptions, sizes: Sizes, network: Network) -> Adapter:
    """DualPrompt's adapter.

    Args:
      options: resolved, no None.
      setting: the stream's sizes.
      network: a ViT.

    Raises:
      InputError: for more blocks with prefixes than the network has.
    """
    check_blocks("dual_blocks", options.dual_shared_blocks + options.dual_blocks, network)
    whole = options.dual_upload == "all"
    copies = options.dual_transfer or sizes.tasks  # tasks whose prefixes may start as copies

    def init(key: PRNGKeyArray, frozen) -> DualPrompts:
        """Uniform in [-1, 1], keys too."""
        del frozen
        keys, width, tasks = jax.random.split(key, 3), network.width, sizes.tasks
        draw = lambda key, *shape: jax.random.uniform(key, (*shape, width), minval=-1.0, maxval=1.0)
        shared = draw(keys[0], options.dual_shared_blocks, 2, options.dual_shared_length)
        own = draw(keys[1], tasks, options.dual_blocks, 2, options.dual_length)
        return DualPrompts(shared, own, draw(keys[2], tasks))

    def open_task(params: DualPrompts, task: Task) -> DualPrompts:
        """A task's prefix starts as the one before; keys never do."""
        copied = (task.index > 0) & (task.index < copies)
        start = jnp.where(copied, params.own[jnp.maximum(task.index - 1, 0)], params.own[task.index])
        return params._replace(own=params.own.at[task.index].set(start))

    def part(params: DualPrompts, task: Task) -> DualPrompts:
        return params if whole else current(params, task)

    def trained(part: DualPrompts, task: Task) -> DualPrompts:
        return current(part, task) if whole else part

    def put(params: DualPrompts, task: Task, part: DualPrompts) -> DualPrompts:
        if whole:
            return part
        own, key = params.own.at[task.index].set(part.own), params.key.at[task.index].set(part.key)
        return DualPrompts(part.shared, own, key)

    def prefixes(
        cached: DualPrompts | tuple[()], part: DualPrompts, query: Array, task: Task, train: bool, mask: Array
    ) -> Float[Array, "batch blocks 2 length width"]:
        """Of the tasks' own, for every image."""
        if train:
            own = trained(part, task).own
            return jnp.broadcast_to(own, (len(query), *own.shape))
        every = put(cached, task, part) if isinstance(cached, DualPrompts) else part
        seen = (jnp.arange(sizes.tasks) <= task.index) | (options.dual_candidates == "all")
        score = mask_logits(cosine(query, every.key), seen)
        return every.own[choose(score, mask, 1, options.dual_batchwise)[:, 0]]

    def inject(
        cached: DualPrompts | tuple[()], part: DualPrompts, query: Array, task: Task, train: bool, mask: Array
    ) -> Injection:
        own = prefixes(cached, part, query, task, train, mask)
        shared = jnp.broadcast_to(part.shared, (len(query), *part.shared.shape))
        blocks = [shared[:, i] for i in range(shared.shape[1])] + [own[:, i] for i in range(own.shape[1])]
        lay = mixed_up if options.dual_reshape_bug else lambda both, mask: both
        return Injection(
            prefix={i: Prefix(*jnp.moveaxis(lay(both, mask), 1, 0)) for i, both in enumerate(blocks)}
        )

    def prompt(
        cached: DualPrompts | tuple[()], part: DualPrompts, query: Array, task: Task
    ) -> Float[Array, "b n width"]:
        own = prefixes(cached, part, query, task, False, jnp.ones(len(query), bool))
        shared = jnp.broadcast_to(part.shared, (len(query), *part.shared.shape))
        flat = [x.reshape(len(query), -1, network.width) for x in (shared, own)]
        return jnp.concatenate(flat, axis=1)

    def loss(part: DualPrompts, query: Array, task: Task, mask: Array) -> Float[Array, ""]:
        first = jnp.zeros((len(query), 1), jnp.int32)
        return -options.dual_key_weight * pull(trained(part, task).key[None], query, first, mask)

    return Adapter(
        init,
        open_task,
        part,
        put,
        inject=inject,
        prompt=prompt,
        loss=loss,
        queries=True,
        trained=trained,
        truncated=True,
    )


def current(params: DualPrompts, task: Task) -> DualPrompts:
    """What of all tasks' prefixes trains now."""
    return params._replace(own=params.own[task.index], key=params.key[task.index])


def mixed_up(
    both: Float[Array, "batch 2 length width"], mask: Bool[Array, " batch"]
) -> Float[Array, "batch 2 length width"]:
    """What the release's reshape makes of a batch's keys and values: numbered keys first, then values, image
    by image, they are dealt out in pairs. Padding is no part of the batch, whose rows come first."""
    rows = jnp.sum(mask)
    place = 2 * jnp.arange(len(both))[:, None] + jnp.arange(2)  # of the pair (image, half)
    half, image = jnp.divmod(place, jnp.maximum(rows, 1))
    mixed = both[image.clip(0, len(both) - 1), half.clip(0, 1)]
    return jnp.where(mask[:, None, None, None], mixed, both)
