"""What a client says of itself and the server can check: the one place where an upload that is finite may
still be refused.

The server knows how many examples each client has. A weight, a number of examples or a precision that no such
client can have is a lie or a mistake: the upload is left out, and counted under the claim's name.
"""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Int, Num

from fcljax.types import Claim, ClientContext, Program, Upload


def possible_weight(context: ClientContext, upload: Upload) -> Bool[Array, ""]:
    """Whether a client with so many examples can have this weight; without examples to count it is 1."""
    weight = jnp.asarray(upload.weight, jnp.float32)
    return (weight >= 0) & (weight <= jnp.maximum(context.client.examples, 1))


WEIGHT = Claim("weight", possible_weight)


def claims_of(program: Program) -> tuple[Claim, ...]:
    """All claims of a program's uploads."""
    return (WEIGHT, *program.claims)


def held(program: Program, context: ClientContext, upload: Upload) -> Bool[Array, " claims"]:
    """Which claims of an upload are possible, as the client sent it."""
    return jnp.stack([claim.holds(context, upload) for claim in claims_of(program)])


def possible_counts(counts: Num[Array, " n"], examples: Int[Array, ""]) -> Bool[Array, ""]:
    """Whether numbers of different examples can be those of a client with so many: each in [0, examples], and
    together no more."""
    # each is compared before they are added: sums of large integers wrap around
    each = jnp.all((counts >= 0) & (counts <= examples))
    return each & (jnp.sum(jnp.clip(counts, 0, examples).astype(jnp.float32)) <= examples)


def within(values: Num[Array, "..."], least: ArrayLike, most: ArrayLike) -> Bool[Array, ""]:
    """Whether all values [...] lie in [least, most]; NaN does not."""
    return jnp.all((values >= least) & (values <= most))
