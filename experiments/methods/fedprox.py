"""FedProx (Li et al. 2020): FedAvg whose clients are pulled to the model that they were sent."""

import dataclasses

import optax

from fcljax import ClientRule, Method, MethodEntry, Run, cross_entropy_loss, federate, linear_learner


@dataclasses.dataclass(frozen=True)
class FedProxOptions:
    mu: float = 0.01
    """Weight of the proximal term mu / 2 ||w - w_t||^2; clients were sent w_t."""


def fedprox(options: FedProxOptions, run: Run) -> Method:
    def pull(step, memory):
        change = optax.tree.sub(step.trainable, step.context.payload.trainable)
        return options.mu / 2 * optax.tree.norm(change, squared=True)

    rules = (ClientRule("fedprox", loss=pull),)
    return federate(run, linear_learner(run), loss=cross_entropy_loss(), client_rules=rules)


METHOD = MethodEntry("FedAvg with a proximal term", FedProxOptions, fedprox, adapter="linear")
