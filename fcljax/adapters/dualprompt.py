"""DualPrompt: prefixes that all tasks share, and one prefix per task (Wang et al., ECCV 2022), as in pMAE's
release (specification 6.2).

The shared prefixes (G) are in the first two blocks, those of tasks (E) in the three after them. Training uses
the current task's E. Evaluation, and a server that trains, use the E whose key is nearest to the image, as in
the paper; in the release the one that is nearest to most images of the batch, where padding has no vote. A
client that was sent the current task's E alone uses it also where it reads its examples as in evaluation, to
choose exemplars for example.
"""

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fcljax.adapters.l2p import choose_prompts, pull, uniform
from fcljax.adapters.slots import Slots
from fcljax.models.heads import cosine, mask_logits
from fcljax.models.vit import Injection, Prefix, check_blocks
from fcljax.options import option
from fcljax.parts.learner import Adapter
from fcljax.types import Network, Sizes, Task


@dataclasses.dataclass(frozen=True)
class DualPromptOptions:
    """Options of the adapter `dualprompt`; the values are those of pMAE's release."""

    dual_shared_length: int = 5
    """Tokens of the shared prefix."""
    dual_length: int = 20
    """Tokens of a task's prefix."""
    dual_shared_blocks: int = 2
    """Number of blocks with the shared prefix, counted from the first."""
    dual_blocks: int = 3
    """Number of blocks with a task's prefix; they follow those with the shared one."""
    dual_key_weight: float = 0.1
    """Weight of the cosine similarity of the task's key and the query."""
    dual_eval_batchwise: bool = False
    """Evaluate a batch with one prefix, the one with the most votes. Predictions then
    depend on the batch."""
    dual_transfer: int = option(0, least=0)
    """Last task, counted from 1, whose prefix starts as a copy of the previous one; 0:
    all tasks."""
    dual_reshape_bug: bool = False
    """Reproduce the release's layout of a batch's task prefixes: the first half of the
    images gets keys in place of values, the second half values in place of keys."""
    dual_upload: Literal["current", "all"] = "current"
    """Prefixes and keys that clients and server send: those of the current task, or of
    all tasks."""
    dual_candidates: Literal["seen", "all"] = "seen"
    """Tasks among which evaluation chooses."""


PRESETS = {
    "intended": DualPromptOptions(),
    "paper": DualPromptOptions(dual_candidates="all"),
    "released": DualPromptOptions(
        dual_eval_batchwise=True,
        dual_transfer=10,
        dual_reshape_bug=True,
        dual_upload="all",
        dual_candidates="all",
    ),
}


BATCHWISE = ("dual_eval_batchwise", "dual_reshape_bug")  # options by which predictions depend on the batch


class DualPrompts(NamedTuple):
    """Prefixes as keys and values of each block, and the tasks' keys; what trains has `own` and `key` of the
    current task, [blocks, 2, length, width] and [width]."""

    shared: Float[Array, "blocks 2 length width"]
    own: Float[Array, "tasks blocks 2 length width"] | Float[Array, "blocks 2 length width"]
    key: Float[Array, "tasks width"] | Float[Array, " width"]


Cached: TypeAlias = DualPrompts | tuple[()]  # the server's parameters, or a client's empty cache


def dualprompt(options: DualPromptOptions, sizes: Sizes, network: Network) -> Adapter:
    """DualPrompt's adapter.

    Args:
      options: of the prefixes and their choice.
      sizes: of the stream.
      network: a ViT.

    Raises:
      InputError: for more blocks with prefixes than the network has.
    """
    check_blocks("dual_blocks", options.dual_shared_blocks + options.dual_blocks, network)
    slots = Slots(("own", "key"), whole=options.dual_upload == "all")
    copies = options.dual_transfer or sizes.tasks  # tasks whose prefixes may start as copies

    def init(key: PRNGKeyArray, frozen) -> DualPrompts:
        del frozen
        return uniform_prompts(key, options, sizes.tasks, network.width)

    def open_task(params: DualPrompts, task: Task) -> DualPrompts:
        """A task's prefix starts as the one before; keys never do."""
        copied = (task.index > 0) & (task.index < copies)
        start = jnp.where(copied, params.own[jnp.maximum(task.index - 1, 0)], params.own[task.index])
        return params._replace(own=params.own.at[task.index].set(start))

    def prefixes(
        cached: Cached, trainable: DualPrompts, query: Array, task: Task, train: bool, mask: Array
    ) -> Float[Array, "batch blocks 2 length width"]:
        """A task's prefix for every image."""
        has_all = slots.whole or isinstance(cached, DualPrompts)
        if train or not has_all:
            own = slots.counted(trainable, task).own
            return jnp.broadcast_to(own, (len(query), *own.shape))
        every = slots.merge(cached, task, trainable) if isinstance(cached, DualPrompts) else trainable
        seen = (jnp.arange(sizes.tasks) <= task.index) | (options.dual_candidates == "all")
        score = mask_logits(cosine(query, every.key), seen)
        return every.own[choose_prompts(score, mask, 1, options.dual_eval_batchwise)[:, 0]]

    def inject(
        cached: Cached, trainable: DualPrompts, query: Array, task: Task, train: bool, mask: Array
    ) -> Injection:
        own = prefixes(cached, trainable, query, task, train, mask)
        shared = jnp.broadcast_to(trainable.shared, (len(query), *trainable.shared.shape))
        of_task = jnp.unstack(own, axis=1)
        if options.dual_reshape_bug:
            of_task = [mixed_up(both, mask) for both in of_task]
        blocks = [*jnp.unstack(shared, axis=1), *of_task]
        return Injection(prefix={i: Prefix(*jnp.unstack(both, axis=1)) for i, both in enumerate(blocks)})

    def prompt(cached: Cached, trainable: DualPrompts, query: Array, task: Task) -> Float[Array, "b n width"]:
        no_padding = jnp.ones(len(query), bool)  # latents that a server drew
        own = prefixes(cached, trainable, query, task, False, no_padding)
        shared = jnp.broadcast_to(trainable.shared, (len(query), *trainable.shared.shape))
        flat = [x.reshape(len(query), -1, network.width) for x in (shared, own)]
        return jnp.concatenate(flat, axis=1)

    def loss(
        cached: Cached, trainable: DualPrompts, query: Array, task: Task, mask: Array
    ) -> Float[Array, ""]:
        del cached
        first = jnp.zeros((len(query), 1), jnp.int32)
        return -options.dual_key_weight * pull(slots.counted(trainable, task).key[None], query, first, mask)

    return Adapter(
        init,
        open_task,
        trainable=slots.trainable,
        merge=slots.merge,
        inject=inject,
        prompt=prompt,
        loss=loss,
        queries=True,
        counted=slots.counted,
        lasting=slots.lasting,
        truncated=True,
        batchwise=tuple(name for name in BATCHWISE if getattr(options, name)),
    )


def uniform_prompts(key: PRNGKeyArray, options: DualPromptOptions, tasks: int, width: int) -> DualPrompts:
    """Prefixes and keys of all tasks, uniform in [-1, 1]."""
    shapes = (
        (options.dual_shared_blocks, 2, options.dual_shared_length, width),
        (tasks, options.dual_blocks, 2, options.dual_length, width),
        (tasks, width),
    )
    return DualPrompts(*map(uniform, jax.random.split(key, 3), shapes))


def mixed_up(
    both: Float[Array, "batch 2 length width"], mask: Bool[Array, " batch"]
) -> Float[Array, "batch 2 length width"]:
    """What the release's reshape makes of a batch's keys and values: it lists the keys of all images, then
    their values, and gives them out in pairs. Padding follows the batch's examples and is no part of it."""
    examples = jnp.sum(mask)
    position = 2 * jnp.arange(len(both))[:, None] + jnp.arange(2)  # of the pair (image, half)
    half, image = jnp.divmod(position, jnp.maximum(examples, 1))
    mixed = both[image.clip(0, len(both) - 1), half.clip(0, 1)]
    return jnp.where(mask[:, None, None, None], mixed, both)
