"""FedProx (Li et al. 2020): FedAvg whose clients are pulled to the model that they were sent."""

import dataclasses

import jax
import jax.numpy as jnp

from fcljax import Method, MethodEntry, Run, Term, linear
from fcljax.parts.federate import federate
from fcljax.parts.learner import learner


@dataclasses.dataclass(frozen=True)
class FedProxOptions:
    """Options of FedProx."""

    mu: float = 0.01  # strength of the pull


def pull(mu: float) -> Term:
    """mu / 2 ||w - w_t||^2, with w_t what was broadcast."""

    def loss(model, seen, memory):
        squares = lambda now, sent: jnp.sum((now - sent) ** 2)
        return mu / 2 * sum(jax.tree.leaves(jax.tree.map(squares, seen.part, seen.context.payload.part)))

    return Term("fedprox", loss)


def fedprox(options: FedProxOptions, run: Run) -> Method:
    """FedProx on whatever adapter the run has."""
    model = learner(run.network, run.adapter, linear(run.network.width, run.sizes.classes))
    terms = (pull(options.mu), *run.terms)
    return federate(model, run.sizes, run.train, terms, aggregation=run.aggregation)


METHOD = MethodEntry("FedAvg with a proximal term", FedProxOptions, fedprox, adapter="linear")
