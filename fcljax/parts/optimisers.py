"""The optimisers of the clients: each gives the direction of a step, which the learning
rates then scale."""

import dataclasses

import optax

from fcljax.options import option
from fcljax.parts.optimise import joined_steps


@dataclasses.dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015), with an L2 penalty as weight decay."""

    weight_decay: float = 0.0
    """Client weight decay: its product with the parameters is added to the gradient."""

    def build(self) -> optax.GradientTransformation:
        """Return the direction of a step from the gradient."""
        # the decay passes through Adam's scaling, as in torch.optim.Adam; AdamW's does not
        return _decayed(joined_steps(optax.scale_by_adam()), self.weight_decay)


@dataclasses.dataclass(frozen=True)
class SGD:
    """Gradient descent, with an L2 penalty as weight decay."""

    momentum: float = option(0.0, most=1.0)
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Client weight decay: its product with the parameters is added to the gradient."""

    def build(self) -> optax.GradientTransformation:
        """Return the direction of a step from the gradient."""
        # without momentum the state is empty, which saves a copy of the trainable
        # parameters per client
        direction = optax.identity()
        if self.momentum:
            direction = joined_steps(optax.trace(self.momentum))
        return _decayed(direction, self.weight_decay)


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    weight_decay: float = 1e-2
    """Client weight decay: its product with the parameters is added to Adam's
    direction, so that the learning rate multiplies it."""

    def build(self) -> optax.GradientTransformation:
        """Return the direction of a step from the gradient."""
        return optax.chain(joined_steps(optax.scale_by_adam()), optax.add_decayed_weights(self.weight_decay))


def _decayed(
    direction: optax.GradientTransformation,
    weight: float,
) -> optax.GradientTransformation:
    """Return the optimiser after adding `weight` times the parameters to the gradient."""
    if not weight:
        return direction
    return optax.chain(optax.add_decayed_weights(weight), direction)
