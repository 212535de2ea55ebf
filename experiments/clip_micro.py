#!/usr/bin/env python3
"""Train the packaged text tower of `vit_micro`, which makes it a tiny CLIP of characters.

    python experiments/clip_micro.py fcljax/assets/vit_micro_text.safetensors

The images are rendered: the first 200 letters that `vit_micro` was trained on, the 100 letters of the
data set `glyphs` from another seed, and the ten digits. `vit_micro` stays as it is. A text is the name of a
character in a template. The loss is CLIP's, with the names of all characters of a step as classes. A CLIP
from the web has seen the classes of its benchmarks too; no image of `digits` or `glyphs` is trained on.
"""

import json
import sys
import unicodedata

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fcljax.data.glyphs import GLYPHS, PRETRAIN, glyph_fields, sample_glyphs
from fcljax.models.clip import LEAST_NORM, ClassTexts, image_features, packaged_tokens, padded, text_tower
from fcljax.models.heads import unit
from fcljax.models.shapes import TEXT_TOWERS
from fcljax.models.text import init_text
from fcljax.models.vit import ViTConfig
from fcljax.models.weights.pretrained import load_backbone, save_native
from fcljax.pretraining.encoder import features
from fcljax.pretraining.training import VALIDATION_SEED, warmup_cosine

NAME = "vit_micro"
CHARACTERS = PRETRAIN[:200] + GLYPHS + "0123456789"
TEMPLATES = ("{}", "{}.", "a photo of a {}", "a photo of a {}.", "an image of {}", "the character {}.")
IMAGES = 20  # of each character
HELD_OUT = 4  # of these
JOINT = 64
STEPS = 500
CLASSES = 96  # of a step
PEAK = 2e-3
LARGEST_SCALE = 100.0


def name_of(character: str) -> str:
    """Return the name of a character in a prompt."""
    return character if character.isdecimal() else unicodedata.name(character)


def image_tokens() -> np.ndarray:
    """Return vit_micro's features of all images, [characters, IMAGES, width]."""
    backbone = load_backbone(NAME, None, None)
    assert isinstance(backbone.config, ViTConfig)
    label = np.repeat(np.arange(len(CHARACTERS)), IMAGES)
    grey = sample_glyphs(glyph_fields(CHARACTERS), label, np.random.default_rng(VALIDATION_SEED))
    return features(backbone.config, backbone.params, grey).reshape(len(CHARACTERS), IMAGES, -1)


def main() -> None:
    """Write the file that the argument names."""
    config = TEXT_TOWERS[NAME]
    images = image_tokens()
    width = images.shape[-1]
    names = list(map(name_of, CHARACTERS))
    prompts = [template.format(name) for template in TEMPLATES for name in names]
    tokens = padded(packaged_tokens(config, prompts))
    tokens = {key: x.reshape(len(TEMPLATES), len(names), -1) for key, x in tokens.items()}
    key = jax.random.key(0)
    params = {
        "text": init_text(key, config),
        "text_projection": 0.1 * jax.random.normal(key, (config.width, JOINT)),
        "image_projection": 0.1 * jax.random.normal(jax.random.fold_in(key, 1), (width, JOINT)),
        "logit_scale": jnp.log(14.0),
    }
    optimiser = optax.adamw(warmup_cosine(PEAK, 0.1, STEPS), weight_decay=0.05)
    features_of = text_tower(config, JOINT).features

    def logits(params, image, ids, mask):
        scale = jnp.minimum(jnp.exp(params["logit_scale"]), LARGEST_SCALE)
        projections = params["text_projection"], params["image_projection"]
        texts = ClassTexts(params["text"], *projections, scale, ids, mask, ids)
        return scale * image_features(texts, image) @ unit(features_of(texts, None), LEAST_NORM).T

    def loss(params, image, ids, mask):
        scores = logits(params, image, ids, mask)
        return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(ids))).mean()

    @jax.jit
    def step(params, state, image, ids, mask):
        value, gradient = jax.value_and_grad(loss)(params, image, ids, mask)
        updates, state = optimiser.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    rng = np.random.default_rng(0)
    state = optimiser.init(params)
    for i in range(STEPS):
        chosen = rng.choice(len(names), CLASSES, replace=False)
        image = images[chosen, rng.integers(HELD_OUT, IMAGES, CLASSES)]
        template = rng.integers(len(TEMPLATES))
        ids = tokens["ids"][template, chosen]
        mask = tokens["mask"][template, chosen]
        params, state, value = step(params, state, image, ids, mask)
        if i % 100 == 0 or i == STEPS - 1:
            print(i, float(value), float(jnp.exp(params["logit_scale"])), flush=True)
    scores = jax.jit(logits)(params, images[:, 0], tokens["ids"][2], tokens["mask"][2])
    right = np.argmax(scores, axis=-1) == np.arange(len(names))
    print("held-out images, among all names", right.mean(), right[200:300].mean(), right[300:].mean())
    about = {"format": "fcljax", "clip": json.dumps({"image": NAME, "templates": TEMPLATES})}
    params["logit_scale"] = jnp.minimum(params["logit_scale"], jnp.log(LARGEST_SCALE))
    save_native(sys.argv[1], jax.device_get(params), about, dtype="float16")


if __name__ == "__main__":
    main()
