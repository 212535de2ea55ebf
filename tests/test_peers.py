"""What experiments/bench_peers.py compares is the same work: plain loops give the engine's numbers."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs

sys.path.append(str(small_runs.ROOT / "experiments"))

from peers import dense, game, prompted

from fcljax.federated.sweep import Lanes
from fcljax.models.vit import ViTConfig, apply_vit

MLP = dense.Dense((6,), (), (5,), 3, (7, 2, 4), batch=3, epochs=2, rate=0.3)
CNN = dense.Dense((4, 4, 1), (2, 3), (5,), 3, (4, 3), batch=3, rate=0.3)
MICRO = ViTConfig(image_size=16, patch=8, width=16, depth=2, heads=2, mlp=32)


def in_order(client, epoch, rows):
    return np.arange(rows)


def unshuffled(federation):
    """The same federation, whose clients read their rows in order."""
    (each,) = federation.method.rounds
    (phase,) = each.program.phases
    program = each.program._replace(phases=(phase._replace(view=phase.view._replace(shuffle=False)),))
    return federation._replace(method=federation.method._replace(rounds=(each._replace(program=program),)))


@functools.cache
def by_engine(work):
    """The weights after a round, by name."""
    federation = dense.game_of(work)
    server = game.round_of(unshuffled(federation), Lanes(2, "vmap"))()
    return dense.weights_of(federation._replace(server=server))


def assert_same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(np.asarray(found[name]), np.asarray(value), err_msg=name, **tolerance)


def test_plain_loops_in_jax_give_the_engines_model():
    federation = dense.game_of(MLP)
    expected = by_engine(MLP)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), expected, dense.weights_of(federation))
    assert min(moved.values()) > 1e-3  # a round that changes nothing would agree with anything
    for loop in (dense.jax_steps, dense.jax_clients):
        assert_same(loop(MLP, federation, in_order)(), expected, atol=1e-5)


@pytest.mark.parametrize("work", [MLP, CNN], ids=["mlp", "cnn"])
def test_the_loop_in_torch_gives_the_engines_model(work):
    pytest.importorskip("torch")
    federation = dense.game_of(work)
    assert_same(dense.torch_steps(work, federation, in_order)(), by_engine(work), atol=1e-5)


@functools.cache
def one_batch(method):
    """A batch without augmentation, and a federation whose step is gradient descent at a rate so large that
    the gradient can be read from it."""
    work = prompted.Work(
        method, MICRO, (6, 3), 6, test=8, augment=False, optimiser="sgd", rate=1000.0, blocks=2
    )  # fmt: skip
    federation = prompted.game_of(work)
    rows = jnp.asarray(game.rows_of(federation.roster, 0))
    image, label, _ = federation.fetch(federation.data, rows, jax.random.split(game.KEY, 6), True)
    loss, before, after = prompted.clients_step(federation, image, label)
    gradient = jax.tree.map(lambda a, b: (a - b) / work.rate, before, after)
    return work, federation, image, label, loss, gradient


@pytest.mark.parametrize("how", ["released", "frozen", "lean"])
def test_fppl_in_torch_has_our_loss_and_gradients(how):
    torch = pytest.importorskip("torch")
    from peers import torch_vit

    work, federation, image, label, loss, gradient = one_batch("fppl")
    net = torch_vit.Fppl(work, federation, how)
    prototype = torch_vit.tensor(federation.server.steps[0].vector).mean(0)[prompted.TASK_CLASSES :]
    theirs = torch_vit.fppl_loss(net, torch_vit.tensor(image), torch_vit.tensor(label).long(), prototype)
    theirs.backward()
    assert theirs.item() == pytest.approx(loss, rel=1e-4)
    found = {
        "prompt": net.prompt.grad[1], "psi": net.psi.grad, "sigma": net.sigma.grad,
        "kernel": net.fc.weight.grad.T,
    }  # fmt: skip
    gate = gradient.adapter.gate
    expected = {
        "prompt": gradient.adapter.prompt, "psi": gate.psi, "sigma": gate.sigma,
        "kernel": gradient.classifier.kernel,
    }  # fmt: skip
    assert_same(found, expected, atol=1e-4 * float(jnp.abs(gradient.adapter.prompt).max()), rtol=1e-4)
    assert not torch.any(net.prompt.grad[0])
    assert (net.vit.patch.weight.grad is not None) == (how == "released")


@pytest.mark.parametrize("how", ["released", "lean"])
def test_pilora_in_torch_has_our_loss_and_gradients(how):
    pytest.importorskip("torch")
    from peers import torch_vit

    work, federation, image, label, loss, gradient = one_batch("pilora")
    net = torch_vit.Pilora(work, federation, how)
    theirs, _ = torch_vit.pilora_loss(net, torch_vit.tensor(image), torch_vit.tensor(label).long())
    theirs.backward()
    assert theirs.item() == pytest.approx(loss, rel=1e-4)
    found = {name: x.grad for name, x in zip(gradient.adapter._fields, net.pairs[1], strict=True)}
    assert_same(found, {n: x[0] for n, x in gradient.adapter._asdict().items()}, atol=1e-5, rtol=1e-4)
    centres = np.stack([x.grad for x in net.centres[prompted.TASK_CLASSES :]])
    np.testing.assert_allclose(centres, gradient.classifier, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("method", ["fppl", "pilora"])
def test_the_plain_loss_in_jax_has_our_loss_and_gradients(method):
    work, federation, image, label, loss, gradient = one_batch(method)
    part, fixed = prompted.start_of(work, federation)
    of = lambda part: prompted.LOSSES[method](
        work, part, federation.frozen.network, fixed, image, label, jnp.ones(len(label))
    )
    (plain, _), found = jax.jit(jax.value_and_grad(of, has_aux=True))(part)
    assert float(plain) == pytest.approx(loss, rel=1e-4)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(gradient._replace(stats=())), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-3)


def test_flops_of_the_formula_are_those_of_the_compiled_network():
    vit = dataclasses.replace(MICRO, width=64, mlp=256, heads=4, image_size=32)
    frozen = prompted.frozen_of(vit).network
    image = jnp.zeros((2, 32, 32, 3))
    compiled = jax.jit(lambda frozen, image: apply_vit(vit, frozen, image).cls).lower(frozen, image).compile()
    # XLA counts sums, norms and activations too
    assert 0.85 < 2 * prompted.forward_flops(vit, 0, 0) / compiled.cost_analysis()["flops"] < 1
