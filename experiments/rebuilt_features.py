"""How much of the classes do the images keep that a decoder rebuilds for pMAE's server?

    python experiments/rebuilt_features.py --mask 0.75 0.5 -- --decoder FILE   # and options of run pmae

Every class of the first task has a mean feature, of its training images or of what the decoder rebuilds of
them without a prompt. Test images go to the class whose mean is nearest by the angle. Prints the share that
goes to the right one: first with means of the images themselves, then for each hidden share of patches.
"""

import argparse
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fcljax.commands import running
from fcljax.data.store import Split
from fcljax.methods.pmae import autoencoder_of, reconstructed
from fcljax.models.heads import cosine, unit
from fcljax.models.mae import random_mask, unpatchify
from fcljax.pixels import between
from fcljax.runs.build import Experiment, build
from fcljax.runs.features import frozen_features
from fcljax.runs.inputs import network_of
from fcljax.runs.predict import make_features
from fcljax.types import Frozen

BATCH = 50


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mask", type=float, nargs="+", default=[0.75], help="hidden shares of patches")
    parser.add_argument("run", nargs="*", help="options of `fcljax run pmae`, after --")
    options = parser.parse_args()
    given = running.parse_run("pmae", options.run, "python experiments/rebuilt_features.py", "")
    exp = build(running.settings("pmae", given, running.Paths()))
    for hidden, right in shares(exp, options.mask):
        what = "the images themselves" if hidden is None else f"rebuilt, {hidden:g} hidden"
        print(f"{what}: {100 * right:.1f} %", flush=True)


def shares(exp: Experiment, masks: list[float]) -> Iterator[tuple[float | None, float]]:
    """(hidden share, test images of the first task that are nearest to their class's mean), for each."""
    scenario = exp.scenario
    frozen = frozen_features(exp.inputs, BATCH)
    classes = scenario.tasks[0].classes
    train = np.flatnonzero(np.isin(scenario.train_label, classes))
    test = np.flatnonzero(np.isin(scenario.test_label, classes))
    seen = frozen(exp.frozen, exp.test, test)
    for hidden in (None, *masks):
        compute = frozen if hidden is None else rebuilt_features(exp, hidden)
        kept = unit(jnp.asarray(compute(exp.frozen, exp.train, train)))
        means = jnp.stack([kept[scenario.train_label[train] == one].mean(axis=0) for one in classes])
        nearest = classes[np.asarray(cosine(jnp.asarray(seen), means)).argmax(axis=1)]
        yield hidden, float(np.mean(nearest == scenario.test_label[test]))


def rebuilt_features(exp: Experiment, hidden: float) -> Callable:
    """As `frozen_features`, of what is rebuilt where this share of the patches is hidden.

    An image's number draws which of its patches these are.
    """
    network = network_of(exp.inputs.backbone, exp.inputs.preprocess)
    pair = autoencoder_of(network)

    def read(split: Split, index: Array) -> tuple[Array, Array]:
        return exp.read(split, index), jax.vmap(jax.random.key)(index)

    def feature(frozen: Frozen, images: tuple[Array, Array]) -> Array:
        image, keys = images
        masking = random_mask(keys, len(image), pair.patches, hidden)
        patches = reconstructed(pair, frozen, between(network, pair, image), masking, None)
        image = between(pair, network, unpatchify(patches, pair.patch))
        return network.apply(frozen.network, image, None, False)[0].cls

    return make_features(feature, read, BATCH)


if __name__ == "__main__":
    main()
