"""FedProx (Li et al. 2020): FedAvg whose clients are pulled to the model that they were sent."""

import dataclasses

import jax
import jax.numpy as jnp

from fcljax import Kit, Method, MethodEntry, Term, linear
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
        return mu / 2 * sum(jax.tree.leaves(jax.tree.map(squares, seen.part, seen.ctx.wire.part)))

    return Term("fedprox", loss)


def fedprox(options: FedProxOptions, kit: Kit) -> Method:
    """FedProx on whatever adapter the run has."""
    model = learner(kit.network, kit.adapter, linear(kit.network.width, kit.setting.classes))
    terms = (pull(options.mu), *kit.terms)
    return federate(model, kit.setting, kit.train, terms, aggregation=kit.aggregation)


METHOD = MethodEntry("FedAvg with a proximal term", FedProxOptions, fedprox, adapter="linear")
