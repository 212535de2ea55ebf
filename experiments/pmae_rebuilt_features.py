"""What of the classes is left in the images that pMAE's server rebuilds, as the frozen encoder sees them.

    python experiments/pmae_rebuilt_features.py --mask 0.75 0.5 [options of `fcljax run pmae`]

The features of the first task's training images, and of the same images rebuilt without a prompt from the
patches that are not hidden, each make a mean for every class; the task's test images go to the nearest mean
(by the angle). Prints the accuracy with means of the images themselves, then by the share that is hidden.
"""

import argparse
import sys

import jax
import numpy as np
from jaxtyping import Array, Float

from fcljax.commands import running
from fcljax.methods.pmae import autoencoder_of, rebuilt
from fcljax.models.mae import random_mask, unpatchify
from fcljax.pixels import between
from fcljax.runs.build import Experiment, build
from fcljax.runs.inputs import network_of

BATCH = 50


def features(exp: Experiment, split, rows: np.ndarray, ratio: float | None) -> Float[np.ndarray, "n D"]:
    """Of unit length, of these rows, or of what is rebuilt of them where a share of the patches is hidden."""
    network = network_of(exp.inputs.backbone, exp.inputs.preprocess)
    pair = autoencoder_of(network)

    @jax.jit
    def some(frozen, split, rows: Array, key: Array) -> Array:
        image = exp.read(split, rows)
        if ratio is not None:
            own = between(network, pair, image)
            masking = random_mask(key, len(rows), pair.patches, ratio)
            image = between(pair, network, unpatchify(rebuilt(pair, frozen, own, masking, None), pair.patch))
        return network.apply(frozen.network, image, None, False)[0].cls

    found = []
    for first in range(0, len(rows), BATCH):
        mine = np.resize(rows[first:], BATCH) if first + BATCH > len(rows) else rows[first : first + BATCH]
        key = jax.random.fold_in(jax.random.key(0), first)
        found.append(np.asarray(some(exp.frozen, split, mine, key)))
    whole = np.concatenate(found)[: len(rows)]
    return whole / np.linalg.norm(whole, axis=1, keepdims=True)


def main(arguments: list[str]) -> None:
    """Print the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mask", type=float, nargs="+", default=[0.75], help="shares that are hidden")
    own, rest = parser.parse_known_args(arguments)
    given = running.parse_run("pmae", rest, "python experiments/pmae_rebuilt_features.py", "")
    exp = build("pmae", running.settings("pmae", given, running.Paths()))
    scenario, classes = exp.scenario, exp.scenario.tasks[0].classes
    train, test = scenario.partitions[0][0].indices, np.flatnonzero(np.isin(scenario.test_label, classes))
    label = scenario.train_label[train]
    seen = features(exp, exp.test, test, None)
    for ratio in (None, *own.mask):
        kept = features(exp, exp.train, train, ratio)
        means = np.stack([kept[label == one].mean(axis=0) for one in classes])
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        nearest = np.asarray(classes)[(seen @ means.T).argmax(axis=1)]
        right = float(np.mean(nearest == scenario.test_label[test]))
        what = "the images themselves" if ratio is None else f"rebuilt, {ratio:g} hidden"
        print(f"{what}: {100 * right:.1f} % of {len(test)} test images", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
