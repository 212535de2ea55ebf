"""CCVR: Gaussians merged from the clients' means and covariances, and the calibration of the classifier on
features drawn from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import SIZES, STREAM, WIDTH
from test_fedrecon import PIXELS, run_of

from fcljax.methods.ccvr import CCVROptions, calibration
from fcljax.models.heads import Head, apply_head
from fcljax.parts.class_gaussians import EXTRA_VARIANCE, ClassSums
from fcljax.parts.learner import Params
from fcljax.parts.server import ServerRound

RNG = np.random.default_rng(0)
CLIENTS, CLASSES = 3, SIZES.classes
MEANS = 3 * RNG.normal(size=(CLASSES, WIDTH))
# examples of each client and class of the task: no client has all, and class 2 is nowhere
COUNTS = np.array([[30, 2, 0], [0, 25, 0], [9, 0, 0]])
FEATURES = [
    [MEANS[label] + RNG.normal(size=(n, WIDTH)) for label, n in enumerate(counts)] for counts in COUNTS
]
# its third class, without examples, wins everywhere
KERNEL = jnp.asarray(0.1 * RNG.normal(size=(WIDTH, CLASSES)), jnp.float32)
BIASED = Head(KERNEL, jnp.asarray([0.0, 5, 9, 0, 0]))


def sums_of(client):
    z = FEATURES[client]
    feature = np.stack([x.sum(0) for x in z])
    outer = np.stack([x.T @ x for x in z])
    counts = jnp.asarray(COUNTS[client], jnp.int32)
    return ClassSums(jnp.asarray(feature, jnp.float32), jnp.asarray(outer, jnp.float32), counts)


def calibrated():
    """The classifier and the Gaussians after the first task."""
    rule = calibration(CCVROptions(calibration_epochs=200, calibration_lr=0.3), run_of(False, PIXELS))
    total = jax.tree.map(lambda *leaves: sum(leaves), *map(sums_of, range(CLIENTS)))
    given = {"task": STREAM[0], "reports": {"statistics": total}, "key": jax.random.key(1)}
    round_ = ServerRound(**dict.fromkeys(ServerRound._fields) | given)
    params = Params((), BIASED)
    update = rule.update(round_, params, rule.init(params, params))
    return update.params.classifier, update.state


@pytest.mark.long
def test_gaussians_are_merged_and_the_classifier_is_trained_on_features_drawn_from_them():
    head, known = calibrated()
    for label in (0, 1):
        # the paper's formulas, from each client's number, mean and covariance
        clients = [z[label] for z in FEATURES if len(z[label]) > 1]
        n = [len(z) for z in clients]
        mean = sum(n_k * z.mean(0) for n_k, z in zip(n, clients, strict=True)) / sum(n)
        within = sum((n_k - 1) * np.cov(z.T) for n_k, z in zip(n, clients, strict=True))
        between = sum(n_k * np.outer(z.mean(0), z.mean(0)) for n_k, z in zip(n, clients, strict=True))
        covariance = (within + between - sum(n) * np.outer(mean, mean)) / (sum(n) - 1)
        np.testing.assert_allclose(known.mean[label], mean, rtol=1e-5, atol=1e-5)
        spread = np.asarray(known.root[label] @ known.root[label].T) - EXTRA_VARIANCE * np.eye(WIDTH)
        np.testing.assert_allclose(spread, covariance, atol=1e-4)
    assert known.present.tolist() == [True, True, False, False, False]

    def accuracy(head):
        """Among the classes with examples, on the clients' own features, which nobody sent."""
        x = jnp.asarray(np.concatenate([z[label] for label in (0, 1) for z in FEATURES]), jnp.float32)
        label = np.repeat([0, 1], COUNTS.sum(0)[:2])
        return float(jnp.mean(jnp.argmax(apply_head(head, x)[:, :2], 1) == label))

    assert accuracy(BIASED) < 0.7 and accuracy(head) > 0.95
    # classes without examples do not compete, and keep their columns
    np.testing.assert_array_equal(head.kernel[:, 2:], BIASED.kernel[:, 2:])
