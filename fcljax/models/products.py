"""Matrix products of the networks in their compute type.

With bfloat16 both factors are rounded to it, forwards and backwards, and the sum is float32. What follows a
product here (a bias, GELU, softmax, the residual sum) is float32 in any case, and XLA's CPU backend has no
other fast bfloat16 product: for a bfloat16 result it widens both factors first.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
# Of float32, where the platform would round the factors of a product (TPUs to bfloat16, NVIDIA GPUs to TF32):
# for statistics, prototypes, distances, prompts and classifiers. A CPU does not round.
exact_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
exact_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def product(spec: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """The einsum of two arrays of one type, as float32.

    Args:
      spec: of `jnp.einsum`, with every index named; each index of a factor stands in the other factor or in
        the result.
      a, b: float32, or bfloat16, in which case the gradient's factors are rounded to it too.
    """
    return _rounded(spec, a, b) if a.dtype == jnp.bfloat16 else jnp.einsum(spec, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(spec: str, a: Array, b: Array) -> Array:
    return einsum(spec, a, b)


def _forward(spec: str, a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return einsum(spec, a, b), (a, b)


def _backward(spec: str, factors: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    a, b = factors
    first, second, result = spec.replace("->", ",").split(",")
    gradient = gradient.astype(a.dtype)
    of_a = einsum(f"{result},{second}->{first}", gradient, b)
    of_b = einsum(f"{first},{result}->{second}", a, gradient)
    return of_a.astype(a.dtype), of_b.astype(b.dtype)


_rounded.defvjp(_forward, _backward)


def matmul(x: Float[Array, "*rows k"], kernel: Float[Array, "k m"]) -> Float[Array, "*rows m"]:
    """x @ kernel, as float32."""
    lead = "abcd"[: x.ndim - 1]
    return product(f"{lead}k,km->{lead}m", x, kernel)


def dense(features: int, dtype: str, name: str) -> nn.Dense:
    """A linear layer with bias: kernel and input in the compute type, the result float32."""
    return nn.Dense(features, dtype=jnp.dtype(dtype), dot_general=_dot_general, name=name)


def _dot_general(x: Array, kernel: Array, dimensions: object, precision: object = None) -> Array:
    del dimensions, precision  # always the last axis of x and the first of the kernel
    return matmul(x, kernel)
