"""Hostile clients against what a toy method of three numbers sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fcljax.errors import InputError
from fcljax.federated import faults
from fcljax.types import Batch, Broadcast, ClientInfo, Ctx, Method, Phase, Program, Round, Task, Upload, View

CLASSES = 8
TASK = Task(jnp.array(1), jnp.array([3, 4, 5, -1]), jnp.zeros(CLASSES, bool), jnp.zeros(CLASSES, bool))


def step(ctx, local, batch, key):
    """The client sees which classes its rows have."""
    del ctx, key
    return {"labels": batch.label}, {}


def finish(ctx, local, state):
    gather = {"labels": local["labels"], "held": jnp.array([True, False]), "h": jnp.ones(2, jnp.bfloat16)}
    return Upload(jnp.array([1.0, -2.0]), {"s": jnp.array(3.0), "n": jnp.array(4)}, gather, 30.0), state + 1


PHASE = Phase(View(epochs=1, batch_size=5), step)
PROGRAM = Program(lambda ctx, state, key: {"labels": jnp.zeros(5, jnp.int32)}, (PHASE, PHASE), finish)
METHOD = Method(
    init=lambda key, frozen: (),
    broadcast=lambda turn, server: Broadcast(()),
    rounds=(Round(PROGRAM), Round(PROGRAM, who="everyone", when="closing")),
    predict=lambda turn, server, batch: jnp.zeros((batch.label.shape[0], CLASSES)),
)
MASK = jnp.array([True, True, True, True, False])


def sent(method: Method, label=(3, 4, 5, 1, 3), task: Task = TASK, which: int = 0, phase: int = 0):
    """What clients 0, 1 and 2 send and keep; one traced function serves all of them."""
    program = method.rounds[which].program
    batch = Batch(jnp.zeros((5, 1, 1, 3)), jnp.array(label), MASK, jnp.arange(5))

    def play(id):
        ctx = Ctx((), (), (), task, ClientInfo(id, jnp.array(5), jnp.zeros(CLASSES, jnp.int32), jnp.array(0)))
        local = program.start(ctx, jnp.array(6), jax.random.key(0))
        local, _ = program.phases[phase].step(ctx, local, batch, jax.random.key(1))
        return program.finish(ctx, local, jnp.array(6))

    return jax.jit(jax.vmap(play))(jnp.arange(3))


def same(left, right):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), left, right)


def of_client(tree, which: int):
    return jax.tree.map(lambda leaf: leaf[which], tree)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("attack, factor", [("sign_flip", -1.0), ("scale", 1e6), ("nan", float("nan"))])
def test_hostile_clients_attack_every_float_that_they_send_in_every_round(attack, factor, which):
    upload, _ = sent(faults.corrupt(METHOD, attack, hostile=2), which=which)
    for client in (0, 1):
        found = of_client(upload, client)
        np.testing.assert_allclose(found.mean, [1.0 * factor, -2.0 * factor], rtol=1e-6)
        np.testing.assert_allclose(found.sum["s"], 3 * factor, rtol=1e-6)
        np.testing.assert_allclose(found.gather["h"].astype(float), [factor] * 2, rtol=1e-2)
        assert found.gather["h"].dtype == jnp.bfloat16


@pytest.mark.parametrize("attack", faults.ATTACKS)
def test_honest_clients_weights_integers_booleans_and_states_stay(attack):
    (upload, state), (honest, same_state) = sent(faults.corrupt(METHOD, attack, hostile=2)), sent(METHOD)
    same(of_client(upload, 2), of_client(honest, 2))
    same(
        (upload.weight, upload.sum["n"], upload.gather["held"]),
        (honest.weight, honest.sum["n"], honest.gather["held"]),
    )
    same(state, same_state)


@pytest.mark.parametrize("phase", [0, 1])
def test_labels_are_mirrored_within_the_task_in_every_phase(phase):
    # classes 3, 4, 5 become 5, 4, 3; class 1 is of another task, and the last row is padding
    upload, _ = sent(faults.corrupt(METHOD, "label_flip", hostile=1), phase=phase)
    assert upload.gather["labels"].tolist() == [[5, 4, 3, 1, 3], [3, 4, 5, 1, 3], [3, 4, 5, 1, 3]]
    same(upload._replace(gather=()), sent(METHOD)[0]._replace(gather=()))


def test_mirroring_twice_gives_the_labels_back():
    label = jnp.arange(CLASSES)
    mirrored = jax.jit(faults.mirror_labels)(label, TASK)
    assert mirrored.tolist() == [0, 1, 2, 5, 4, 3, 6, 7]
    assert faults.mirror_labels(mirrored, TASK).tolist() == label.tolist()
    assert faults.mirror_labels(label, TASK._replace(classes=jnp.array([2, 3, 4, 5])))[2] == 5


def test_everything_else_of_the_method_is_the_same_object():
    program = PROGRAM._replace(receive=lambda ctx, upload: upload)
    method = METHOD._replace(rounds=(Round(program, server=lambda *args: args, when="opening"),))
    for attack in faults.ATTACKS:
        wrong = faults.corrupt(method, attack, hostile=1)
        assert wrong._replace(rounds=()) == method._replace(rounds=())
        assert wrong.rounds[0]._replace(program=None) == method.rounds[0]._replace(program=None)
        new = wrong.rounds[0].program
        assert (new.start, new.receive) == (program.start, program.receive) and new != program
        assert [phase.view for phase in new.phases] == [phase.view for phase in program.phases]


def test_nobody_hostile_is_the_method_itself():
    assert faults.corrupt(METHOD, "nan", hostile=0) is METHOD
    assert faults.FaultOptions().hostile == 0


def test_an_unknown_attack_and_a_negative_number_of_clients_are_refused():
    with pytest.raises(InputError, match="attack: unknown value 'flip'; did you mean 'sign_flip'"):
        faults.corrupt(METHOD, "flip", hostile=1)
    with pytest.raises(InputError, match="hostile: must be at least 0, got -1"):
        faults.corrupt(METHOD, "nan", hostile=-1)
