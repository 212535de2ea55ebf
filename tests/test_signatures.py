"""The signatures of the package are checked while tests run: shapes everywhere, other types
outside of inner functions."""

import jax.numpy as jnp
import pytest
from beartype import beartype
from jaxtyping import Array, Float, TypeCheckError, jaxtyped

from fcljax.options import flag


def test_a_type_that_is_wrong_is_refused():
    with pytest.raises(TypeCheckError):
        flag(3)


def test_shapes_are_checked_in_inner_functions_too():
    @jaxtyped(typechecker=beartype)
    def product(a: Float[Array, "n k"], b: Float[Array, "k m"] | None) -> Float[Array, "n m"]:
        return jnp.ones((a.shape[0], 4)) if b is None else a @ b

    assert product(jnp.ones((2, 3)), jnp.ones((3, 5))).shape == (2, 5)
    with pytest.raises(TypeCheckError):
        product(jnp.ones((2, 3)), jnp.ones((4, 5)))
