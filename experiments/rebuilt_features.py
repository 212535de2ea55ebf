"""How much of the classes do the images keep that a decoder rebuilds for pMAE's server?

    python experiments/rebuilt_features.py --mask 0.75 0.5 -- --decoder FILE   # and options of run pmae

Every class of the first task has a mean feature, of its training images or of what the decoder rebuilds of
them without a prompt. Test images go to the class whose mean is nearest by the angle. Prints the share that
goes to the right one: first with means of the images themselves, then for each hidden share of patches.
"""

import argparse
import functools

import jax
import numpy as np
from jaxtyping import Array, Float

from fcljax.commands import running
from fcljax.methods.pmae import autoencoder_of, rebuilt
from fcljax.models.mae import random_mask, unpatchify
from fcljax.pixels import between
from fcljax.runs.build import Experiment, build
from fcljax.runs.inputs import network_of
from fcljax.types import Network

BATCH = 50


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mask", type=float, nargs="+", default=[0.75], help="hidden shares of patches")
    parser.add_argument("run", nargs="*", help="options of `fcljax run pmae`, after --")
    options = parser.parse_args()
    given = running.parse_run("pmae", options.run, "python experiments/rebuilt_features.py", "")
    exp = build(running.settings("pmae", given, running.Paths()))
    print(f"the images themselves: {100 * share(exp, None):.1f} %", flush=True)
    for hidden in options.mask:
        print(f"rebuilt, {hidden:g} hidden: {100 * share(exp, hidden):.1f} %", flush=True)


def share(exp: Experiment, hidden: float | None) -> float:
    """Test images of the first task that are nearest to their class's mean."""
    scenario = exp.scenario
    classes = scenario.tasks[0].classes
    train = np.flatnonzero(np.isin(scenario.train_label, classes))
    test = np.flatnonzero(np.isin(scenario.test_label, classes))
    kept, seen = features(exp, exp.train, train, hidden), features(exp, exp.test, test, None)
    means = np.stack([kept[scenario.train_label[train] == one].mean(axis=0) for one in classes])
    nearest = classes[(seen @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T).argmax(axis=1)]
    return float(np.mean(nearest == scenario.test_label[test]))


def features(exp: Experiment, split, rows: np.ndarray, hidden: float | None) -> Float[np.ndarray, "n width"]:
    """Features of these images, or of what is rebuilt of them, of length 1."""
    network, found = network_of(exp.inputs.backbone, exp.inputs.preprocess), []
    some = jax.jit(functools.partial(feature, network, hidden))
    for first in range(0, len(rows), BATCH):
        image = exp.read(split, np.resize(rows[first : first + BATCH], BATCH))
        found.append(np.asarray(some(exp.frozen, image, jax.random.key(first))))
    whole = np.concatenate(found)[: len(rows)]
    return whole / np.linalg.norm(whole, axis=1, keepdims=True)


def feature(network: Network, hidden: float | None, frozen, image: Array, key: Array) -> Array:
    """The network's features [batch, width] of images, after their patches were hidden and rebuilt."""
    if hidden is not None:
        pair = autoencoder_of(network)
        masking = random_mask(key, len(image), pair.patches, hidden)
        patches = rebuilt(pair, frozen, between(network, pair, image), masking, None)
        image = between(pair, network, unpatchify(patches, pair.patch))
    return network.apply(frozen.network, image, None, False)[0].cls


if __name__ == "__main__":
    main()
