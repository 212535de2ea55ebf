"""L2P: prompts of a pool are chosen by their keys and go through the whole network (Wang et al., CVPR 2022),
as pMAE's release has it (specification 6.1).

The prompts stand between class token and patches, all with the class token's position embedding; the
classifier reads the mean of what becomes of them. A batch chooses together: every image votes for its nearest
keys, and all images get the prompts with the most votes, in training and in evaluation, so that what an image
gets depends on its batch; padding has no vote. `batchwise` off lets every image choose by itself.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.errors import InputError
from fcljax.models.heads import cosine, reduce_rows
from fcljax.models.vit import Injection
from fcljax.parts.learner import Adapter
from fcljax.types import Features, Network, Sizes, Task


@dataclasses.dataclass(frozen=True)
class L2POptions:
    """Options of the adapter `l2p`; the values are those of pMAE's release."""

    l2p_size: int = 10
    """Prompts in the pool."""
    l2p_length: int = 5
    """Tokens of a prompt."""
    l2p_top_k: int = 5
    """Prompts that are chosen for an image."""
    l2p_key_weight: float = 0.1
    """Weight of the cosine similarity of the chosen keys and the query."""
    l2p_batchwise: bool = True
    """Whether the images of a batch share their choice."""


class KeyedPrompts(NamedTuple):
    """Prompts and their keys. All of them train in every task."""

    prompt: Float[Array, "size length width"]
    key: Float[Array, "size width"]


def l2p(options: L2POptions, sizes: Sizes, network: Network) -> Adapter:
    """L2P's adapter.

    Args:
      options: of the pool.
      setting: not read: the pool is the same for all tasks.
      network: a ViT.

    Raises:
      InputError: for a choice of more prompts than there are.
    """
    del sizes
    if options.l2p_top_k > options.l2p_size:
        raise InputError(
            f"l2p_top_k: {options.l2p_top_k} of a pool of {options.l2p_size}; nearest: {options.l2p_size}"
        )

    def init(key: PRNGKeyArray, frozen) -> KeyedPrompts:
        """Uniform in [-1, 1], keys too."""
        del frozen
        prompt, keys = jax.random.split(key)
        draw = lambda key, *shape: jax.random.uniform(key, (*shape, network.width), minval=-1.0, maxval=1.0)
        return KeyedPrompts(draw(prompt, options.l2p_size, options.l2p_length), draw(keys, options.l2p_size))

    def chosen(part: KeyedPrompts, query: Array, mask: Array) -> Int[Array, "batch chosen"]:
        return choose(cosine(query, part.key), mask, options.l2p_top_k, options.l2p_batchwise)

    def tokens(part: KeyedPrompts, query: Array, mask: Array) -> Float[Array, "batch tokens width"]:
        return part.prompt[chosen(part, query, mask)].reshape(len(query), -1, network.width)

    def prompt(cached, part: KeyedPrompts, query: Array, task: Task) -> Float[Array, "batch tokens width"]:
        del cached, task
        return tokens(part, query, jnp.ones(len(query), bool))

    def inject(cached, part: KeyedPrompts, query: Array, task: Task, train: bool, mask: Array) -> Injection:
        del cached, task, train
        return Injection(tokens=tokens(part, query, mask))

    def loss(part: KeyedPrompts, query: Array, task: Task, mask: Array) -> Float[Array, ""]:
        del task
        return -options.l2p_key_weight * pull(part.key, query, chosen(part, query, mask), mask)

    return Adapter(
        init, inject=inject, prompt=prompt, loss=loss, feature=mean_of_prompts, truncated=True, queries=True
    )


def mean_of_prompts(features: Features) -> Float[Array, "batch width"]:
    """What the classifier reads."""
    if features.prompts is None:
        raise InputError("l2p: the network gives back no injected tokens; it works on a vision transformer")
    return features.prompts.mean(axis=1)


def choose(
    score: Float[Array, "batch size"], mask: Bool[Array, " batch"], count: int, batchwise: bool
) -> Int[Array, "batch count"]:
    """Which prompts each image gets: those with the highest scores, or those that most images of the batch
    would get. Of prompts with equally many votes it is the one with the lower number."""
    nearest = jax.lax.top_k(score, count)[1]
    if not batchwise:
        return nearest
    votes = jnp.sum(jax.nn.one_hot(nearest, score.shape[1]) * mask[:, None, None], axis=(0, 1))
    return jnp.broadcast_to(jax.lax.top_k(votes, count)[1], nearest.shape)


def pull(
    key: Float[Array, "size width"],
    query: Float[Array, "batch width"],
    chosen: Int[Array, "batch count"],
    mask: Bool[Array, " batch"],
) -> Float[Array, ""]:
    """The mean over the rows of the sum of the cosines of a query and its chosen keys."""
    near = jnp.take_along_axis(cosine(query, key), chosen, axis=1)
    return reduce_rows(jnp.sum(near, axis=1), mask, jnp.sum(mask), "mean")
