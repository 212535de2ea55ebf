"""How much pMAE's reconstructive prompt can gain: it is trained alone, in one place, on one task's images.

    python experiments/pmae_prompt.py --prompt-steps 600 --prompt-lr 2e-2 [options of `fcljax run pmae`]
    python experiments/pmae_prompt.py --negative ...        # on the images' negatives, training and test

The loss is the method's (hidden patches, un-normalised pixels) and so is the prompt's random start; there are
no clients, no classifier and no averaging, so that what is left is what the decoder can take from a prompt.
Prints the mean squared error of hidden pixels (of 0 to 1) of the first task's test images, whose masks are
fixed, without a prompt and with the prompt as training goes on. Negatives are images of a kind that a decoder
of photographs has not seen: a task whose images look unlike those that the decoder knows.
"""

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from fcljax.commands import running
from fcljax.methods.pmae import autoencoder_of, rebuilt
from fcljax.models.mae import random_mask, reconstruction_loss
from fcljax.pixels import between
from fcljax.runs.build import Experiment, build
from fcljax.runs.inputs import network_of

LOOKS = 6  # at the test images, while training goes on


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of this script, and those of the run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-steps", type=int, default=600)
    parser.add_argument("--prompt-batch", type=int, default=32)
    parser.add_argument("--prompt-lr", type=float, nargs="+", default=[2e-2], help="Adam's; each is tried")
    parser.add_argument("--prompt-length", type=int, default=5)
    parser.add_argument("--negative", action="store_true", help="of all images")
    return parser.parse_known_args(arguments)


def loss_of(exp: Experiment, ratio: float, negative: bool) -> Any:
    """loss(frozen, split, rows, key, prompt): the term's, of these rows under masks of this key."""
    network = network_of(exp.inputs.backbone, exp.inputs.preprocess)
    pair = autoencoder_of(network)

    def loss(frozen, split, rows: Array, key: Array, prompt: Float[Array, "length width"] | None) -> Array:
        image = between(network, pair, exp.read(split, rows))
        if negative:  # of pixels in 0..1, as (x - mean) / std has them
            mean, std = jnp.array(pair.mean), jnp.array(pair.std)
            image = (1 - 2 * mean) / std - image
        masking = random_mask(key, len(rows), pair.patches, ratio)
        patches = rebuilt(pair, frozen, image, masking, prompt)
        return reconstruction_loss(patches, image, masking.masked)

    return loss, pair


def main(arguments: list[str]) -> None:
    """Train a prompt for every rate and print what it gains."""
    own, rest = parse(arguments)
    given = running.parse_run("pmae", rest, "python experiments/pmae_prompt.py", "")
    cfg = running.settings("pmae", given, running.Paths())
    exp = build("pmae", cfg)
    loss, pair = loss_of(exp, cfg.mask_ratio, own.negative)
    test = np.flatnonzero(np.isin(exp.scenario.test_label, exp.scenario.tasks[0].classes))
    mine = exp.scenario.partitions[0][0].indices
    look, unit = jax.jit(loss), float(np.mean(np.square(pair.std)))

    def error(prompt) -> float:
        """Over the test images, in pixels of 0 to 1."""
        size = own.prompt_batch
        parts = [test[i : i + size] for i in range(0, len(test) - size + 1, size)]
        key = lambda i: jax.random.fold_in(jax.random.key(1), i)
        found = [look(exp.frozen, exp.test, rows, key(i), prompt) for i, rows in enumerate(parts)]
        return unit * float(np.mean(found))

    print(f"{len(mine)} training and {len(test)} test images; error without a prompt: {error(None):.5f}")
    for rate in own.prompt_lr:
        prompt = train(own, exp, loss, mine, pair.width, rate, error)
        print(f"rate {rate:g}, at the end: {error(prompt):.5f}", flush=True)


def train(
    own: argparse.Namespace, exp: Experiment, loss: Any, mine: np.ndarray, width: int, rate: float, error: Any
) -> Float[Array, "length width"]:
    """The prompt after all steps; says what it is worth on the way."""
    optimiser = optax.adam(rate)

    @jax.jit
    def step(frozen, split, prompt, state, rows, key):
        gradient = jax.grad(loss, argnums=4)(frozen, split, rows, key, prompt)
        change, state = optimiser.update(gradient, state)
        return optax.apply_updates(prompt, change), state

    prompt = jax.random.uniform(jax.random.key(0), (own.prompt_length, width), minval=-1.0, maxval=1.0)
    state, rng = optimiser.init(prompt), np.random.default_rng(0)
    for i in range(own.prompt_steps):
        if i % -(-own.prompt_steps // LOOKS) == 0:
            print(f"rate {rate:g}, step {i}: {error(prompt):.5f}", flush=True)
        rows = np.sort(rng.choice(mine, own.prompt_batch, replace=False))
        key = jax.random.fold_in(jax.random.key(2), i)
        prompt, state = step(exp.frozen, exp.train, prompt, state, rows, key)
    return prompt


if __name__ == "__main__":
    main(sys.argv[1:])
