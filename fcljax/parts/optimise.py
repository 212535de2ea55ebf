"""The loop in which servers and generators train: a number of optimiser steps on a loss."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from fcljax.federated.sums import joined, parted
from fcljax.types import Weighted

StepLoss = Callable[[PyTree, Int[Array, ""]], Float[Array, ""]]


def optimise(
    loss: StepLoss,
    params: PyTree,
    optimiser: optax.GradientTransformation,
    steps: ArrayLike,
) -> tuple[PyTree, Weighted]:
    """Minimise `loss(params, i)`, i being the number of the step.

    Args:
      loss: a scalar; it may draw its batch with i.
      params: the initial values.
      optimiser: starts anew, and its state ends with the loop.
      steps: their number, which may be traced.

    Returns:
      The parameters after the last step, and the mean of the losses.
    """

    def step(i: Array, carry: tuple) -> tuple:
        params, state, total = carry
        value, gradient = jax.value_and_grad(loss)(params, i)
        update, state = optimiser.update(gradient, state, params)
        return optax.apply_updates(params, update), state, total + value

    start = (params, optimiser.init(params), jnp.zeros(()))
    params, _, total = jax.lax.fori_loop(0, steps, step, start)
    # sum and count, so that means of several rounds and hosts add up
    return params, Weighted(total, jnp.asarray(steps).astype(jnp.float32))


def joined_steps(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimiser that takes the same steps on all small arrays as one vector.

    XLA compiles kernels for every array of Adam's state, and adapters have many.

    Args:
      inner: an elementwise optimiser, as gradient descent and Adam are.
    """

    def init(params: PyTree) -> PyTree:
        return inner.init(joined(jax.tree.leaves(params)))

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        leaves = jax.tree.leaves(updates)
        vector = None
        if params is not None:
            vector = joined(jax.tree.leaves(params))
        step, state = inner.update(joined(leaves), state, vector)
        leaf_steps = parted(jax.tree.leaves(step), leaves)
        return jax.tree.unflatten(jax.tree.structure(updates), leaf_steps), state

    return optax.GradientTransformation(init, update)
