"""A weighted pool of prefix prompts (HePCo, section 4.1): an image's prompt is the sum of
all prompts of the pool, each times the cosine of its key and the image's feature without
prompts.

The sum has no softmax and no top k: weights may be negative. Half of a prompt becomes
keys of its block's attention and half values; they bypass the block's projection
(prefix tuning).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, PRNGKeyArray

from fcljax.errors import InputError
from fcljax.models.heads import unit
from fcljax.models.products import exact_matmul
from fcljax.models.vit import Injection, Prefix, check_blocks
from fcljax.options import option
from fcljax.parts.learner import Adapter, Mixture
from fcljax.types import Network, Sizes, Task


@dataclasses.dataclass(frozen=True)
class PoolOptions:
    """Options of the adapter `pool`; the values are HePCo's."""

    pool_size: int = option(100, least=1)
    """Number M of prompts per block."""
    pool_length: int = option(20, least=2)
    """Tokens of a prompt, an even number; half are keys and half values."""
    pool_blocks: int = 5
    """Number of blocks with prompts, counted from the first."""


class Pool(NamedTuple):
    """Prompts and their keys, of every block with prompts.

    All of them train in every task."""

    prompt: Float[Array, "blocks size length width"]
    key: Float[Array, "blocks size width"]


def pool(options: PoolOptions, _sizes: Sizes, network: Network) -> Adapter:
    """Return HePCo's adapter for a ViT; its pool is the same for all tasks.

    Raises:
      InputError: for more blocks with prompts than the network has, or an odd length.
    """
    check_blocks("pool_blocks", options.pool_blocks, network)
    check_even("pool_length", options.pool_length)

    def init(key: PRNGKeyArray, _frozen) -> Pool:
        # prompts and keys are uniform in [0, 1), as in the release
        prompt_key, key_key = jax.random.split(key)
        shape = (options.pool_blocks, options.pool_size)
        prompt = jax.random.uniform(prompt_key, (*shape, options.pool_length, network.width))
        return Pool(prompt, jax.random.uniform(key_key, (*shape, network.width)))

    def prompt(
        _cached, trainable: Pool, query: Array, _task: Task
    ) -> Float[Array, "batch blocks length width"]:
        return weighted_prompts(trainable, query)

    def inject(_cached, trainable: Pool, query: Array, _task: Task, _train: bool, _mask: Array) -> Injection:
        return prefix_injection(weighted_prompts(trainable, query))

    def mixture(_cached, trainable: Pool, query: Array, _task: Task) -> Mixture:
        # a group per block, whose basis are the block's prompts as vectors
        basis = trainable.prompt.reshape(*trainable.prompt.shape[:2], -1)
        return Mixture(jnp.moveaxis(weights(trainable, query), 0, 1), basis)

    return Adapter(init, inject=inject, prompt=prompt, mixture=mixture, queries=True)


def weights(
    pool: Pool,
    query: Float[Array, "batch width"],
) -> Float[Array, "blocks batch size"]:
    """Return cos(q, K_lm) of each prompt m, for each block l."""
    query = unit(query, eps=1e-12)
    keys = unit(pool.key, eps=1e-12)
    # block by block, as in `weighted_prompts`
    return jax.lax.map(lambda key: exact_matmul(query, key.T), keys)


def weighted_prompts(
    pool: Pool, query: Float[Array, "batch width"]
) -> Float[Array, "batch blocks length width"]:
    """Return rho_l(q) = sum_m cos(q, K_lm) P_lm (HePCo, section 4.1)."""
    blocks, size, length, _ = pool.prompt.shape
    basis = pool.prompt.reshape(blocks, size, -1)
    # a loop over blocks: on a CPU five matrix products take a fifth of the time of a
    # batched one, and the loop's is compiled once
    prompts = jax.lax.map(lambda block: exact_matmul(*block), (weights(pool, query), basis))
    return rearrange(prompts, "l b (t d) -> b l t d", t=length)


def check_even(field: str, length: int) -> None:
    """Check that a prompt can be divided into keys and values (`prefix_injection`).

    Raises:
      InputError: for an odd length.
    """
    if length % 2:
        raise InputError(
            f"{field}: {length} tokens cannot be half keys and half values; nearest: {length + 1}"
        )


def prefix_injection(prompt: Float[Array, "batch blocks length width"]) -> Injection:
    """Return the injection with half of each block's tokens as keys, half as values."""
    # `unstack` and not indexing: its gradient stacks the parts', where that of each index
    # is an array padded to the full size
    blocks = jnp.unstack(rearrange(prompt, "b l (two n) d -> l two b n d", two=2))
    prefixes = [Prefix(*jnp.unstack(keys_and_values)) for keys_and_values in blocks]
    return Injection(prefix=dict(enumerate(prefixes)))
