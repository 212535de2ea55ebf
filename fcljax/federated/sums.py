"""Sums over clients, for leaves that are stacked over them: [K, ...] or [lanes, ...].

Sums are taken in float32 at least (float64 leaves stay float64). An invalid client has
no influence, whatever its leaves contain: it is left out by selection, never by a
factor, because 0 * NaN is NaN.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Num

from fcljax.types import PyTree

# an array, or only its shape and dtype
Leaf = Array | np.ndarray | jax.ShapeDtypeStruct
# leaves of at most so many scalars are joined, so that they share one compiled kernel
SMALL = 2**16


def sum_zeros(shapes: PyTree, floating: bool = False) -> PyTree:
    """Return an empty running sum, for `add_stacked`.

    Args:
      shapes: leaves with the shape and dtype of ONE upload, arrays or `jax.ShapeDtypeStruct`.
      floating: whether uploads are weighted. Integer and boolean leaves are then summed
        in float32 as well.

    Returns:
      Zeros [...] in float32 for narrower floats (a bfloat16 sum of ones stops at 256);
        float64, and without `floating` integers and booleans, keep their dtype.
    """

    def zero(leaf: Leaf) -> Array:
        dtype = leaf.dtype
        if floating or is_float(leaf):
            dtype = _wide_dtype(dtype)
        return jnp.zeros(leaf.shape, dtype)

    return jax.tree.map(zero, shapes)


def add_stacked(
    total: PyTree,
    stacked: PyTree,
    valid: Bool[Array, " L"],
    weight: Num[Array, " L"] | None = None,
) -> PyTree:
    """Add the valid entries of leaves [L, ...] to `total [...]`, in the total's dtype.

    With weights, each entry is multiplied by its own. Booleans without weight are
    combined by "or".
    """

    def add(total: Array, leaf: Array) -> Array:
        terms = leaf.astype(total.dtype)
        if weight is not None:
            terms = terms * broadcast_left(weight, leaf).astype(total.dtype)
        # after the product: a weight of 0 times NaN is NaN
        terms = jnp.where(broadcast_left(valid, leaf), terms, jnp.zeros((), total.dtype))
        if total.dtype == bool:
            return total | jnp.any(terms, axis=0)
        return total + jnp.sum(terms, axis=0)

    return jax.tree.map(add, total, stacked)


def sum_value(total: PyTree, like: PyTree) -> PyTree:
    """Return a finished sum, or its mean, in the dtypes of `like`; integers and booleans
    are rounded."""
    return jax.tree.map(cast_like, total, like)


def shares(weight: Num[Array, " K"], valid: Bool[Array, " K"]) -> Array:
    """Return the valid clients' weights [K] over their sum; zeros if the sum is 0."""
    weight = jnp.where(valid, weight, 0).astype(jnp.float32)
    total = jnp.sum(weight)
    return jnp.where(total > 0, weight / jnp.where(total > 0, total, 1), 0)


# ---- clients whose upload is rejected --------------------------------------------------


def is_finite(tree: PyTree) -> Bool[Array, ""]:
    """Return whether every floating-point leaf is free of NaN and inf; other leaves are
    ignored."""
    checks = [jnp.all(jnp.isfinite(vector)) for vector in joined(jax.tree.leaves(tree))]
    if not checks:
        return jnp.asarray(True)
    return jnp.all(jnp.stack(checks))


def became_non_finite(new: PyTree, old: PyTree) -> Bool[Array, ""]:
    """Return whether a finite number of `old` is NaN or infinite in `new`."""
    new_leaves = joined(jax.tree.leaves(new))
    old_leaves = joined(jax.tree.leaves(old))
    checks = []
    for new_leaf, old_leaf in zip(new_leaves, old_leaves, strict=True):
        checks.append(jnp.any(~jnp.isfinite(new_leaf) & jnp.isfinite(old_leaf)))
    if not checks:
        return jnp.zeros((), bool)
    return jnp.any(jnp.stack(checks))


def joined(leaves: Sequence[ArrayLike]) -> list[Array]:
    """Return floating-point leaves, those of up to `SMALL` scalars as one last vector.

    A check of every shape by itself takes 50 ms to compile.
    """
    floats = [leaf for leaf in map(jnp.asarray, leaves) if is_float(leaf)]
    small = [leaf.reshape(-1) for leaf in floats if leaf.size <= SMALL]
    large = [leaf for leaf in floats if leaf.size > SMALL]
    if not small:
        return large
    return [*large, jnp.concatenate(small)]


def parted(vectors: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    """Undo `joined`: return arrays of the shapes and types of the leaves `like`."""
    # `joined` puts the large leaves first, in their order, and the small ones last
    small_leaves = [leaf for leaf in like if leaf.size <= SMALL]
    large = iter(vectors)
    small = iter(())
    if small_leaves:
        _, unravel = ravel_pytree(small_leaves)
        small = iter(unravel(vectors[-1]))
    return [next(small if leaf.size <= SMALL else large) for leaf in like]


def one_of(condition: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """Return `new` if the condition holds, else `old`.

    Small leaves are copied together: a kernel that chooses between numbers takes 10 ms
    to compile per leaf.
    """
    old_leaves, structure = jax.tree.flatten(old)
    pairs = list(zip(structure.flatten_up_to(new), old_leaves, strict=True))
    small = [pair for pair in pairs if pair[0].size <= SMALL]
    new_small = [new_leaf for new_leaf, _ in small]
    old_small = [old_leaf for _, old_leaf in small]
    copied = iter(jax.lax.cond(condition, lambda: new_small, lambda: old_small))
    leaves = [next(copied) if a.size <= SMALL else jnp.where(condition, a, b) for a, b in pairs]
    return jax.tree.unflatten(structure, leaves)


def finite_guard(
    stacked: PyTree, weight: Num[Array, " K"], valid: Bool[Array, " K"]
) -> tuple[Num[Array, " K"], Bool[Array, " K"], Int[Array, ""]]:
    """Reject clients with NaN or inf in a leaf [K, ...] or weight, or a negative weight.

    Returns:
      (weight, valid, rejected): weight is 0 and valid False for rejected and for already
        invalid clients; `rejected` counts clients that were valid before.
    """
    finite = jax.vmap(is_finite)((stacked, weight)) & (weight >= 0)
    accepted = valid & finite
    return jnp.where(accepted, weight, 0), accepted, jnp.sum(valid & ~finite, dtype=jnp.int32)


# ---- leaves ----------------------------------------------------------------------------


def is_float(leaf: Leaf) -> bool:
    """Return whether a leaf is a floating-point array."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _wide_dtype(dtype: np.dtype) -> np.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def widen(leaf: Array) -> Array:
    """Return the leaf in float32, or in float64 if it is that already."""
    return leaf.astype(_wide_dtype(leaf.dtype))


def cast_like(value: Array, leaf: Leaf) -> Array:
    """Return the value in the leaf's dtype, rounded if that holds no fractions."""
    if is_float(value) and not is_float(leaf):
        value = jnp.round(value)
    return value.astype(leaf.dtype)


def broadcast_left(mask: Array, leaf: Array) -> Array:
    """Return the mask with trailing axes of size 1, so that it broadcasts against the
    leaf from the left."""
    return mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim))


def where_valid(leaf: Array, valid: Bool[Array, " K"], fill: float) -> Array:
    """Return the leaf [K, ...] in float32, with `fill` for invalid clients."""
    return jnp.where(broadcast_left(valid, leaf), widen(leaf), fill)
