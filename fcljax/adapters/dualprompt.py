"""DualPrompt: prefixes that all tasks share, and one prefix per task (Wang et al., ECCV
2022), as in pMAE's release.

The shared prefixes (G) are in the first two blocks, those of tasks (E) in the three after
them. Training uses the current task's E. Evaluation, and a server that trains, use the E
whose key is nearest to the image, as in the paper; in the release the one that is nearest
to most images of the batch. Padding has no vote. A client that receives only the current
task's E also uses it in passes in evaluation mode, such as the choice of exemplars.
"""

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fcljax.adapters.l2p import choose_prompts, key_similarity, uniform
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


# options that make predictions depend on the other images of a batch
BATCHWISE = ("dual_eval_batchwise", "dual_reshape_bug")


class DualPrompts(NamedTuple):
    """Prefixes, as keys and values of each block, and the tasks' keys.

    The trainable ones have the current task's `task_prefix` and `key`, without the axis
    of tasks.
    """

    shared: Float[Array, "blocks 2 length width"]
    """G."""
    task_prefix: Float[Array, "tasks blocks 2 length width"] | Float[Array, "blocks 2 length width"]
    """E."""
    key: Float[Array, "tasks width"] | Float[Array, " width"]


# the server's parameters, or a client's empty cache
Cached: TypeAlias = DualPrompts | tuple[()]


def dualprompt(options: DualPromptOptions, sizes: Sizes, network: Network) -> Adapter:
    """Return DualPrompt's adapter for a ViT.

    Raises:
      InputError: for more blocks with prefixes than the network has.
    """
    check_blocks("dual_blocks", options.dual_shared_blocks + options.dual_blocks, network)
    slots = Slots(("task_prefix", "key"), whole=options.dual_upload == "all")
    first_without_transfer = options.dual_transfer or sizes.tasks

    def init(key: PRNGKeyArray, _frozen) -> DualPrompts:
        return uniform_prompts(key, options, sizes.tasks, network.width)

    def open_task(params: DualPrompts, task: Task) -> DualPrompts:
        prefixes = params.task_prefix
        previous = prefixes[jnp.maximum(task.index - 1, 0)]
        # only the prefix is copied: with the same key the two tasks could not be told apart
        is_copied = (task.index > 0) & (task.index < first_without_transfer)
        start = jnp.where(is_copied, previous, prefixes[task.index])
        return params._replace(task_prefix=prefixes.at[task.index].set(start))

    def prefixes(
        cached: Cached, trainable: DualPrompts, query: Array, task: Task, train: bool, mask: Array
    ) -> Float[Array, "batch blocks 2 length width"]:
        """Return a task's prefix for each image."""
        # a client that receives the current task's prefix alone has nothing to choose from
        has_all_tasks = slots.whole or isinstance(cached, DualPrompts)
        if train or not has_all_tasks:
            current = slots.counted(trainable, task).task_prefix
            return jnp.broadcast_to(current, (len(query), *current.shape))
        params = trainable
        if isinstance(cached, DualPrompts):
            params = slots.merge(cached, task, trainable)
        candidates = (jnp.arange(sizes.tasks) <= task.index) | (options.dual_candidates == "all")
        score = mask_logits(cosine(query, params.key), candidates)
        index = choose_prompts(score, mask, 1, options.dual_eval_batchwise)[:, 0]
        return params.task_prefix[index]

    def inject(
        cached: Cached, trainable: DualPrompts, query: Array, task: Task, train: bool, mask: Array
    ) -> Injection:
        task_prefix = prefixes(cached, trainable, query, task, train, mask)
        shared = jnp.broadcast_to(trainable.shared, (len(query), *trainable.shared.shape))
        task_blocks = jnp.unstack(task_prefix, axis=1)
        if options.dual_reshape_bug:
            task_blocks = [mixed_up(block, mask) for block in task_blocks]
        blocks = [*jnp.unstack(shared, axis=1), *task_blocks]
        keys_and_values = [Prefix(*jnp.unstack(block, axis=1)) for block in blocks]
        return Injection(prefix=dict(enumerate(keys_and_values)))

    def prompt(
        cached: Cached, trainable: DualPrompts, query: Array, task: Task
    ) -> Float[Array, "batch n width"]:
        no_padding = jnp.ones(len(query), bool)
        task_prefix = prefixes(cached, trainable, query, task, False, no_padding)
        shared = jnp.broadcast_to(trainable.shared, (len(query), *trainable.shared.shape))
        tokens = [prefix.reshape(len(query), -1, network.width) for prefix in (shared, task_prefix)]
        return jnp.concatenate(tokens, axis=1)

    def loss(
        _cached: Cached, trainable: DualPrompts, query: Array, task: Task, mask: Array
    ) -> Float[Array, ""]:
        key = slots.counted(trainable, task).key[None]
        only_key = jnp.zeros((len(query), 1), jnp.int32)
        return -options.dual_key_weight * key_similarity(key, query, only_key, mask)

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
    """Return initial prefixes and keys of all tasks, uniform in [-1, 1]."""
    shapes = (
        (options.dual_shared_blocks, 2, options.dual_shared_length, width),
        (tasks, options.dual_blocks, 2, options.dual_length, width),
        (tasks, width),
    )
    return DualPrompts(*map(uniform, jax.random.split(key, 3), shapes))


def mixed_up(
    prefix: Float[Array, "batch 2 length width"], mask: Bool[Array, " batch"]
) -> Float[Array, "batch 2 length width"]:
    """Return what the release's reshape makes of a batch's keys and values.

    It lists the keys of all images, then their values, and assigns them in pairs. Padding
    follows the batch's examples and takes no part in it.
    """
    examples = jnp.sum(mask)
    # image i reads entries 2 i and 2 i + 1 of a list whose first half are all keys: for
    # the first half of the images both are keys, for the others both are values
    position = 2 * jnp.arange(len(prefix))[:, None] + jnp.arange(2)
    half, image = jnp.divmod(position, jnp.maximum(examples, 1))
    mixed = prefix[image.clip(0, len(prefix) - 1), half.clip(0, 1)]
    return jnp.where(mask[:, None, None, None], mixed, prefix)
