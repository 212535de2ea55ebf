"""Classes that start at their mean features: the classifiers, and every method with `--headtune`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import FROZEN, KEY, SIZES, STREAM, TINY, method_of, round_context_of
from small_runs import some

from fcljax.checks.examples import network
from fcljax.errors import InputError
from fcljax.methods import METHODS
from fcljax.models.heads import Head
from fcljax.parts.classifiers import Sums, linear, nearest_mean, prototypes
from fcljax.parts.federate import rule_names
from fcljax.types import Aggregate, Task

# class 5 has no examples; the task has a place for a third class, which it lacks
TASK = Task.of_numpy(np.int32(1), np.array([3, 5, -1], np.int32), np.arange(6) == 3, np.arange(6) < 4)
MEANS = jnp.array([[3.0, 4.0], [9.0, 9.0], [7.0, 7.0]])
PRESENT = jnp.array([True, False, True])
# with a classifier that the server computes, or that is personal, or whose parameters are no single values
REFUSE = {"fedncm", "afcl", "fedranpac", "stsa", "fedran", "fedrecon", "vfcl", "fedweit", "fedper", "local"}
# with a classifier that names of classes make
REFUSE |= {"zero-shot", "promptfl", "fedtpg"}
# deep enough for every method's default blocks
NETWORK = network(dataclasses.replace(TINY, depth=6, image_size=16))


def test_weights_of_present_classes_are_means_of_length_1():
    head = Head(jnp.ones((2, 6)), jnp.ones(6))
    after = linear(2, 6).at_means(head, TASK, MEANS, PRESENT)
    np.testing.assert_allclose(after.kernel[:, 3], [0.6, 0.8])
    assert after.bias[3] == 0
    others = jnp.array([0, 1, 2, 4, 5])
    assert (after.kernel[:, others] == 1).all()
    assert (after.bias[others] == 1).all()


def test_prototypes_of_present_classes_are_means():
    after = prototypes(2, 6).at_means(jnp.ones((6, 2)), TASK, MEANS, PRESENT)
    np.testing.assert_array_equal(after[3], MEANS[0])
    assert (after[jnp.array([0, 1, 2, 4, 5])] == 1).all()


def test_a_classifier_for_training_inside_a_computed_one_starts_at_means():
    computed = nearest_mean(2, 6, inner=linear(2, 6))
    params = computed.init(jax.random.key(0))._replace(inner=Head(jnp.ones((2, 6)), jnp.ones(6)))
    after = computed.at_means(params, TASK, MEANS, PRESENT)
    np.testing.assert_allclose(after.inner.kernel[:, 3], [0.6, 0.8])
    assert nearest_mean(2, 6).at_means is None


@pytest.mark.parametrize("method", some(METHODS, [*METHODS][::4]))
def test_every_method_starts_classes_at_means_or_refuses(method):
    options = {"partition": "dirichlet", "aggregator": "mean"}
    if method in REFUSE:
        with pytest.raises(InputError, match="^headtune: .*; leave it out$"):
            method_of(method, SIZES, NETWORK, headtune=True, **options)
        return
    of_server = rule_names(method_of(method, SIZES, NETWORK, headtune=True, **options))["server"]
    assert of_server[-1] == "headtune"
    assert rule_names(method_of(method, SIZES, NETWORK, **options))["server"] == of_server[:-1]


def test_a_class_that_comes_back_keeps_what_it_learned():
    """In a stream of domains every task has the same classes."""
    method = method_of("linear", headtune=True)
    (opening,) = [each for each in method.rounds if each.when == "task_start"]
    task = STREAM[0]
    server = method.init(KEY, FROZEN)
    width = server.params.classifier.kernel.shape[0]

    def opened(server, examples):
        sums = Sums(jnp.ones((SIZES.task_classes, width)), jnp.asarray(examples))
        aggregate = Aggregate((), {"class_sums": sums}, {}, jnp.ones(1), jnp.arange(1), jnp.ones(1, bool))
        return opening.server(round_context_of(task), server, aggregate, KEY)[0]

    first = opened(server, [2.0, 1.0, 0.0])
    np.testing.assert_allclose(first.params.classifier.kernel[:, :2], width**-0.5, rtol=1e-5)
    trained = first._replace(
        params=first.params._replace(classifier=Head(jnp.zeros((width, 5)), jnp.ones(5)))
    )
    second = opened(trained, [4.0, 4.0, 4.0]).params.classifier
    assert not second.kernel[:, :2].any()
    # its first examples
    np.testing.assert_allclose(second.kernel[:, 2], width**-0.5, rtol=1e-5)
