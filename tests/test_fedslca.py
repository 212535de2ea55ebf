"""FedSLCA: class Gaussians merged over clients are those of the pooled examples, and the alignment of the
classifier on features drawn from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import LABEL, SCALE, SIZES, TASKS, begin, engine_of, method_of, play, resolved, round_context_of
from test_closed_form import FEATURES, PARTITIONS
from test_fedrecon import PIXELS, batch_of, run_of

from fcljax.data.tasks import make_tasks
from fcljax.federated import communication
from fcljax.methods.fedslca import FedSLCAOptions, align_classifier, fedslca, normalised, shrunk
from fcljax.models.heads import Head, apply_head
from fcljax.models.shapes import VITS
from fcljax.models.vit import parameter_shapes, vit_network
from fcljax.parts.class_gaussians import EXTRA_VARIANCE, Gaussians, draw_features
from fcljax.runs.build import Experiment
from fcljax.runs.traffic import payload_shapes
from fcljax.scenario import Scenario
from fcljax.types import Frozen, Sizes

OPTIONS = FedSLCAOptions(align_samples=64)
UNEVEN = ("dirichlet 0.05", "one class a client")


@pytest.mark.long
@pytest.mark.parametrize("name", ["iid", *UNEVEN])
def test_covariances_merged_over_clients_are_those_of_the_pooled_examples(name):
    method = fedslca(OPTIONS, run_of(False, PIXELS))
    server, states = begin(method, SCALE)
    partitions = PARTITIONS[name]
    history = play(
        engine_of(method, partitions=partitions, frozen=SCALE), server, states, partitions, frozen=SCALE
    )
    ((known, *_),) = [history[-1][0].rules]
    for label in range(SIZES.classes):
        mine = FEATURES[label == LABEL]
        np.testing.assert_allclose(known.mean[label], mine.mean(0), atol=1e-6)
        spread = np.asarray(known.root[label] @ known.root[label].T) - EXTRA_VARIANCE * np.eye(4)
        np.testing.assert_allclose(spread, np.cov(mine.T), atol=1e-5)
    assert known.task.tolist() == [0, 0, 0, 1, 1]
    check_heads(method, [each[0] for each in history])


def check_heads(method, servers):
    """The first task is not aligned; the second predicts with a copy and leaves what trains as it is."""
    first, middle, last = (each.params.classifier for each in (servers[1], servers[2], servers[3]))
    same = lambda a, b: bool(jnp.all(a.kernel == b.kernel))
    assert (int(first.task), int(middle.task), int(last.task)) == (0, 0, 1)
    assert same(first.aligned, first.inner) and not same(last.aligned, last.inner)
    rows, images = np.arange(20), batch_of(np.arange(20))
    for server, head in ((servers[2], middle.inner), (servers[3], last.aligned)):
        logits = method.predict(round_context_of(TASKS[1], frozen=SCALE), server, images)
        expected = apply_head(head, jnp.asarray(FEATURES[rows], jnp.float32))
        np.testing.assert_allclose(logits, expected, atol=1e-5)


def gaussians(mean, tasks, present=None):
    """Gaussians of standard deviation 0.1 in two dimensions."""
    count = len(mean)
    root = jnp.tile(0.1 * jnp.eye(2), (count, 1, 1))
    there = jnp.ones(count, bool) if present is None else jnp.asarray(present)
    return Gaussians(jnp.asarray(mean, jnp.float32), root, jnp.asarray(tasks), there)


def test_drawn_features_follow_the_gaussians_of_all_classes_that_exist():
    known = gaussians([[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]], [0, 1, 1], [True, True, False])
    feature, label = draw_features(shrunk(known, jnp.int32(1)), 500, jax.random.key(0))
    assert sorted(set(label[:1000].tolist())) == [0, 1] and set(label[1000:].tolist()) == {2}
    assert len(set(label[:20].tolist())) == 2  # shuffled
    for index, mean in ((0, [0.95, 0.0]), (1, [0.0, 2.0])):  # shrunk by 0.9 + 0.1 (t + 1) / (T + 1)
        mine = np.asarray(feature[label == index])
        np.testing.assert_allclose(mine.mean(0), mean, atol=0.02)
        np.testing.assert_allclose(np.cov(mine.T), 0.01 * np.eye(2), atol=2e-3)


def test_logits_are_divided_by_the_mean_length_over_tasks():
    """Task 0 has classes 0 and 1 with logits (3, 4), task 1 class 2 with logit 7: length (5 + 7) / 2."""
    known = gaussians(np.zeros((4, 2)), [0, 0, 1, 1], [True, True, True, False])
    found = normalised(jnp.array([[3.0, 4.0, 7.0, 100.0]]), known, 3, 0.5)
    np.testing.assert_allclose(found[0, :3], np.array([3, 4, 7]) / 6 / 0.5, rtol=1e-6)
    assert found[0, 3] == jnp.finfo(jnp.float32).min


def test_alignment_removes_the_advantage_of_the_newest_classes():
    """A classifier whose second task has far larger biases answers class 2 for every feature."""
    known = gaussians([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [0, 0, 1])
    head = Head(jnp.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]), jnp.array([0.0, 0.0, 5.0]))
    feature, label = draw_features(shrunk(known, jnp.int32(1)), 100, jax.random.key(5))
    right = lambda head: float(jnp.mean(jnp.argmax(apply_head(head, feature), 1) == label))
    assert right(head) < 0.4
    options = FedSLCAOptions(align_epochs=40)
    assert right(align_classifier(options, head, known, jnp.int32(1), 2, jax.random.key(1))) > 0.95


def test_a_client_sends_what_fppl_s_table_1_says():
    """ViT-B/16 on 200 classes in 20 tasks: 91.86e6, the network, its classifier, and, once per task, mean and
    covariance of the ten classes of a task."""
    sizes, vit = Sizes(200, 20, 10, 10), VITS["vit_b16"]
    method = method_of("fedslca", sizes, vit_network(vit))
    scenario = Scenario(None, None, make_tasks(200, 20), None, None)
    known = dict(method=method, scenario=scenario, sizes=sizes, key=jax.random.key(0))
    frozen = Frozen(parameter_shapes(vit))
    payloads = payload_shapes(Experiment(**dict.fromkeys(Experiment._fields) | known | {"frozen": frozen}))
    sent = [communication.count_scalars((upload.mean, upload.sum)) for upload in payloads.uploads]
    assert sent == [85_952_456, 10 * 768 + 10 * 768**2] and sum(sent) == 91_858_376
    assert communication.count_scalars(payloads.broadcast.payload) == 85_952_456


def test_its_rates_are_those_of_the_slow_learner():
    cfg = resolved("fedslca")
    assert (cfg.full_lr, cfg.lr, cfg.adapter, cfg.optimiser) == (1e-4, 1e-2, "full", "adam")
