"""Factorise matrices, on CPUs one after the other.

jaxlib shares the matrices of a batch among the threads that run the program, and waits for
them on one of these threads. On a machine with two cores two batches that do not depend on
each other wait for each other and never end. A batch of one matrix needs no other thread.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from fcljax.types import PyTree


def one_by_one(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the function such that on CPUs `jax.vmap` calls it for one example at a time.

    Other devices compute the batch at once. The result has no gradient.
    """

    # the function's own options, such as `symmetrize_input`, must stay out of its arrays
    @jax.custom_batching.sequential_vmap
    def serial(*arrays: ArrayLike) -> PyTree:
        return function(*arrays)

    def of_one(*arrays: ArrayLike) -> PyTree:
        return jax.lax.platform_dependent(*arrays, cpu=serial, default=function)

    return of_one


def _thin_svd(matrix: ArrayLike) -> PyTree:
    return jnp.linalg.svd(matrix, full_matrices=False)


def _symmetric_inverse(matrix: ArrayLike) -> Array:
    return jnp.linalg.pinv(matrix, rtol=1e-6, hermitian=True)


eigh = one_by_one(jnp.linalg.eigh)
"""matrix [n, n], symmetric -> eigenvalues [n], which ascend, and eigenvectors [n, n]"""
eigvalsh = one_by_one(jnp.linalg.eigvalsh)
"""matrix [n, n], symmetric -> eigenvalues [n], which ascend"""
qr = one_by_one(jnp.linalg.qr)
"""matrix [n, m] -> Q [n, k] and R [k, m] with k = min(n, m)"""
svd = one_by_one(_thin_svd)
"""matrix [n, m] -> U [n, k], singular values [k], which descend, and V^T [k, m]"""
pinv = one_by_one(_symmetric_inverse)
"""matrix [n, n], symmetric -> its pseudo-inverse; eigenvalues below 1e-6 of the largest count as 0"""
