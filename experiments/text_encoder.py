#!/usr/bin/env python3
"""Train the packaged text encoder, `text_micro`, to tell modules of the standard library by docstrings.

    python experiments/text_encoder.py fcljax/assets/text_micro.safetensors

It sees none of the ten packages of the data set `text`. A tenth of the texts is held out, to choose settings.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from text_data import CLASSES, docstrings

from fcljax.data.kinds import TextData, take
from fcljax.models.shapes import TEXT_ENCODERS
from fcljax.models.text import apply_text, init_text
from fcljax.models.weights.pretrained import save_native
from fcljax.pretraining.training import warmup_cosine

NAME = "text_micro"
FEWEST = 10  # docstrings of a module that is a class
STEPS = 400
BATCH = 64
PEAK = 2e-3
DROPPED = 0.15  # of a text's tokens, hidden in a step
SMOOTHING = 0.1  # of the labels


def main() -> None:
    """Write the file that the argument names."""
    texts = {name: of for name, of in docstrings().items() if name not in CLASSES and len(of) >= FEWEST}
    label = np.repeat(np.arange(len(texts)), [len(of) for of in texts.values()])
    x = TextData().encode([text for of in texts.values() for text in of])
    rng = np.random.default_rng(0)
    held_out = rng.random(len(label)) < 0.1
    config = TEXT_ENCODERS[NAME]
    key = jax.random.key(0)
    head = 0.02 * jax.random.normal(key, (config.width, len(texts)))
    params = {"text": init_text(key, config), "head": head}
    optimiser = optax.adamw(warmup_cosine(PEAK, 0.1, STEPS), weight_decay=0.05)

    def logits(params, batch):
        return apply_text(config, params["text"], batch).cls @ params["head"]

    def loss(params, batch, y):
        target = optax.smooth_labels(jax.nn.one_hot(y, len(texts)), SMOOTHING)
        return optax.softmax_cross_entropy(logits(params, batch), target).mean()

    @jax.jit
    def step(params, state, batch, y, key):
        visible = jax.random.uniform(key, batch["mask"].shape) >= DROPPED
        batch = {**batch, "mask": batch["mask"] & visible}
        value, gradient = jax.value_and_grad(loss)(params, batch, y)
        updates, state = optimiser.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    train = np.flatnonzero(~held_out)
    state = optimiser.init(params)
    for i in range(STEPS):
        index = rng.choice(train, BATCH)
        batch = take(x, index)
        params, state, value = step(params, state, batch, label[index], jax.random.fold_in(key, i))
        if i % 100 == 0 or i == STEPS - 1:
            predicted = jnp.argmax(jax.jit(logits)(params, take(x, held_out)), -1)
            print(i, float(value), float(np.mean(predicted == label[held_out])), flush=True)
    about = {"format": "fcljax", "text": json.dumps({"width": config.width, "classes": list(texts)})}
    save_native(sys.argv[1], jax.device_get(params["text"]), about, dtype="float16")


if __name__ == "__main__":
    main()
