"""The prototype classifier: both distances, the two losses, and what happens at distance zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fcljax.methods.pilora import pl_loss
from fcljax.models.prototypes import class_means, dce_loss, distance_logits, distances

FEATURE = jnp.array([[1.0, 2, 2, 0]])
PROTOTYPES = jnp.array([[1.0, 2, 2, 0], [0, 0, 0, 0], [1, 2, 2, 4]])
ALL, ROW = jnp.ones(3, bool), jnp.ones(1, bool)
FORMS = ("sqrt_scaled", "squared")


def drawn(rows, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, 4)), jnp.float32)


@pytest.mark.parametrize(("form", "expected"), [("sqrt_scaled", [0, 1.5, 2]), ("squared", [0, 9, 16])])
def test_distances_of_the_toy(form, expected):  # O5
    assert distances(FEATURE, PROTOTYPES, form)[0].tolist() == expected


@pytest.mark.parametrize(
    ("form", "label", "loss"),
    [
        ("sqrt_scaled", 0, 0.306356),
        ("sqrt_scaled", 1, 1.806356),
        ("squared", 0, 1.2351e-4),
        ("squared", 1, 9.000124),
    ],
)
def test_distance_based_cross_entropy_of_the_toy(form, label, loss):  # O5
    value = float(dce_loss(distances(FEATURE, PROTOTYPES, form), jnp.array([label]), ALL, ROW))
    assert value == pytest.approx(loss, rel=3e-6, abs=3e-8)


def test_the_sum_of_both_losses_of_the_toy():  # O5
    distance, label = distances(FEATURE, PROTOTYPES), jnp.array([1])
    assert float(pl_loss(distance, label, ROW)) == 1.5
    assert float(
        dce_loss(distance, label, ALL, ROW) + 0.001 * pl_loss(distance, label, ROW)
    ) == pytest.approx(1.807856, abs=1e-6)


def test_hardness_scales_distances():
    distance = distances(FEATURE, PROTOTYPES)
    expected = np.log(np.exp([0, -3, -4]).sum()) + 3
    assert float(dce_loss(distance, jnp.array([1]), ALL, ROW, hardness=2.0)) == pytest.approx(
        expected, rel=1e-6
    )


@pytest.mark.parametrize("form", FORMS)
def test_distances_are_those_of_numpy(form):
    feature, prototypes = drawn(5, 0), drawn(7, 1)
    length = np.linalg.norm(np.asarray(feature)[:, None] - np.asarray(prototypes), axis=-1)
    np.testing.assert_allclose(
        distances(feature, prototypes, form), length / 2 if form == "sqrt_scaled" else length**2, rtol=1e-5
    )


def test_distances_far_from_the_origin_keep_their_digits():
    far = 1000.0 + drawn(5, 0)
    nearby = far + 1e-3 * np.float32(2.0) ** jnp.arange(4)
    exact = np.asarray(far, np.float64)[:, None] - np.asarray(nearby, np.float64)
    np.testing.assert_allclose(distances(far, nearby, "squared"), (exact**2).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_value_and_gradients_at_distance_zero_are_finite(form):
    loss = lambda f, m: (
        dce_loss(distances(f, m, form), jnp.array([0]), ALL, ROW)
        + pl_loss(distances(f, m, form), jnp.array([0]), ROW)
    )
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(FEATURE, jnp.repeat(FEATURE, 3, 0))
    assert float(value) == pytest.approx(np.log(3), rel=1e-6)
    assert not any(g.any() for g in gradients)  # the three pull in equal and opposite ways, or not at all


def test_the_root_has_a_unit_gradient_next_to_zero():
    gradient = jax.jit(jax.grad(lambda f: distances(f, FEATURE)[0, 0]))(FEATURE + jnp.array([3e-7, 0, 0, 0]))
    np.testing.assert_allclose(gradient, [[0.5, 0, 0, 0]], rtol=1e-5)


def test_prototypes_that_are_not_allowed_get_no_gradient_and_never_win():
    allowed, label = jnp.array([False, True, True]), jnp.array([1])
    gradient = jax.jit(jax.grad(lambda m: dce_loss(distances(FEATURE, m), label, allowed, ROW)))(PROTOTYPES)
    assert not gradient[0].any() and gradient[1:].any(axis=1).all()
    logits = distance_logits(distances(FEATURE, PROTOTYPES), allowed)
    assert logits[0, 0] == np.finfo(np.float32).min and int(jnp.argmax(logits)) == 1
    assert int(jnp.argmax(distance_logits(distances(FEATURE, PROTOTYPES), ALL))) == 0


@pytest.mark.parametrize("form", FORMS)
def test_masked_rows_are_inert(form):
    label, mask = jnp.array([0, 1, 2]), jnp.array([True, False, True])
    feature = drawn(3, 0)

    def losses(feature):
        distance = distances(feature, PROTOTYPES, form)
        return (
            dce_loss(distance, label, ALL, mask),
            pl_loss(distance, label, mask),
            dce_loss(distance, label, ALL, mask, reduction="sum"),
        )

    clean, poisoned = jax.jit(losses)(feature), jax.jit(losses)(feature.at[1].set(jnp.nan))
    assert clean == poisoned and np.isfinite(poisoned).all()
    np.testing.assert_allclose(clean[2], 2 * clean[0], rtol=1e-6)


def test_class_means_divide_by_rows_and_say_which_classes_have_any():
    means, present = class_means(jnp.array([[2.0, 4], [0, 0]]), jnp.array([2.0, 0]))
    assert means.tolist() == [[1, 2], [0, 0]] and present.tolist() == [True, False]
