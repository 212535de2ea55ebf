"""Claims: what an upload says of its client and the server can check.

The server knows how many examples each client has. A weight, a number of examples or a
precision that no such client can have is a lie or a mistake: the upload is left out,
and counted under the claim's name. Otherwise every finite upload is accepted.
"""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Int, Num

from fcljax.types import Claim, ClientContext, Program, Upload


def possible_weight(context: ClientContext, upload: Upload) -> Bool[Array, ""]:
    """Return whether the client can have this weight: between 0 and its number of
    examples, and at most 1 for a client without examples."""
    weight = jnp.asarray(upload.weight, jnp.float32)
    return (weight >= 0) & (weight <= jnp.maximum(context.client.examples, 1))


WEIGHT = Claim("weight", possible_weight)


def claims_of(program: Program) -> tuple[Claim, ...]:
    """Return all claims of a program's uploads."""
    return (WEIGHT, *program.claims)


def claims_hold(
    program: Program,
    context: ClientContext,
    upload: Upload,
) -> Bool[Array, " claims"]:
    """Return which claims of an upload are possible. The upload is as the client sent
    it."""
    return jnp.stack([claim.holds(context, upload) for claim in claims_of(program)])


def possible_counts(counts: Num[Array, " n"], examples: Int[Array, ""]) -> Bool[Array, ""]:
    """Return whether numbers of different examples are possible: each in [0, examples],
    their sum too."""
    # each is compared before they are added: sums of large integers wrap around
    in_range = jnp.all((counts >= 0) & (counts <= examples))
    total = jnp.sum(jnp.clip(counts, 0, examples).astype(jnp.float32))
    return in_range & (total <= examples)


def within(
    values: Num[Array, "..."],
    least: ArrayLike,
    most: ArrayLike,
) -> Bool[Array, ""]:
    """Return whether all values [...] lie in [least, most]; NaN does not."""
    return jnp.all((values >= least) & (values <= most))
