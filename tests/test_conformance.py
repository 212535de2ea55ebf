"""What every method must hold, one test body for all of them, on a tiny ViT with four clients, one of them
without rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from micro import (
    DATA,
    DEALS,
    FROZEN,
    KEY,
    LABEL,
    SETTING,
    STREAM,
    TINY,
    begin,
    compiled,
    engine_of,
    method_of,
    play,
    receive,
    turn_of,
)
from toys import close, same

from fcljax.federated.engine import Lanes
from fcljax.methods import METHODS
from fcljax.models.vit import Injection, apply_vit
from fcljax.types import Batch

RATE = 1e-3
PROMPTS = {"prompt_length": 3, "prompt_blocks": 2}
LORA = {"lora_lr": RATE, "lora_blocks": 2}
OPTIONS = {
    "fppl": PROMPTS | {"server_epochs": 2},
    "fedavg": PROMPTS,
    "linear": {},
    "pilora": LORA,
    "fedncm": {},
    "fedclm": LORA,
    "joint": LORA,
    "ewc": LORA,
    "lwf": LORA,
    "icarl": LORA | {"memory_size": 6},
}
STATEFUL = {"ewc", "lwf", "icarl"}
PRESENT = [0, 2, 3]  # clients with rows


class Federation:
    """A method with its engine, made once."""

    def __init__(self, name):
        self.method = method_of(name, epochs=2, batch_size=4, lr=RATE, **OPTIONS[name])
        self.engine = engine_of(self.method)
        self.start, self.states = begin(self.method)

    def run(self, deals=DEALS, ids=None, data=DATA):
        """(server, states) after every round of both tasks, with whatever comes before and after the rounds
        of a task."""
        history = play(self.engine, self.start, self.states, deals, ids, data)
        return [(server, states) for server, states, _ in history]

    def receive(self, index, ids, engine=None):
        """What arrives in one of the method's rounds of the second task."""
        server, states = history_of(self)[1]
        return receive(engine or self.engine, index, server, states, DEALS[1], ids, STREAM[1])

    @property
    def rounds(self):
        """The places of the method's rounds."""
        return range(len(self.method.rounds))


@functools.cache
def federation(name):
    return Federation(name)


@functools.cache
def history_of(made):
    return made.run()


def history(name):
    return history_of(federation(name))


def predict(name, server, task):
    """Logits of all images."""
    nothing = jnp.zeros(len(LABEL), jnp.int32)
    rows = Batch(DATA.image, nothing, nothing == 0, nothing)
    return compiled(federation(name).method.predict)(turn_of(task), server, rows)


@pytest.fixture(params=OPTIONS)
def name(request):
    return request.param


def test_every_method_is_here():
    assert set(OPTIONS) == set(METHODS)


def test_everything_stays_finite_and_the_model_moves(name):
    leaves = jax.tree.leaves(history(name)[-1])
    assert all(
        np.all(np.isfinite(np.asarray(leaf, np.float64)))
        for leaf in leaves
        if jnp.issubdtype(leaf.dtype, jnp.number)
    )
    before, after = jax.tree.leaves(federation(name).start), jax.tree.leaves(history(name)[-1][0])
    assert any(np.any(np.asarray(x) != np.asarray(y)) for x, y in zip(before, after, strict=True))


def test_uploads_and_states_do_not_depend_on_who_else_takes_part(name):
    """In every kind of round that the method has."""
    made = federation(name)
    for index in made.rounds:
        together, after = made.receive(index, PRESENT)
        total = jax.tree.map(jnp.zeros_like, (together.mean, together.sum))
        for rank, client in enumerate(PRESENT):
            alone, its = made.receive(index, [client])
            mine = jax.tree.map(lambda x, i=rank: x[i], together.gather)
            same(jax.tree.map(lambda x: x[0], alone.gather), mine)
            same(jax.tree.map(lambda x, i=client: x[i], its), jax.tree.map(lambda x, i=client: x[i], after))
            total = jax.tree.map(jnp.add, total, (alone.mean, alone.sum))
        close(total, (together.mean, together.sum), atol=1e-4)


def test_uploads_do_not_depend_on_lanes(name):
    made = federation(name)
    single = engine_of(made.method, Lanes(1, "loop"))
    for index in made.rounds:
        two, one = (made.receive(index, PRESENT, engine)[0] for engine in (made.engine, single))
        # A student that still equals its teacher has a gradient of nothing but rounding, of which Adam makes
        # whole steps.
        steps = RATE * 6 * float(jnp.sum(two.weight)) if name == "lwf" else 1e-3
        close((two.mean, two.sum, two.gather), (one.mean, one.sum, one.gather), atol=steps)
        assert two.valid.tolist() == one.valid.tolist() and two.id.tolist() == one.id.tolist()


def test_states_follow_the_client_and_those_who_are_absent_keep_theirs(name):
    made = federation(name)
    before, after = made.states, made.run(ids=[2])[-1][1]
    if not jax.tree.leaves(before):
        assert name not in STATEFUL
        return
    row = lambda tree, client: jax.tree.map(lambda x: np.asarray(x[client]), tree)
    for client in (0, 1, 3):
        same(row(after, client), row(before, client))
    changed = [
        np.any(x != y)
        for x, y in zip(jax.tree.leaves(row(after, 2)), jax.tree.leaves(row(before, 2)), strict=True)
    ]
    assert any(changed) and name in STATEFUL


def test_rows_that_nobody_holds_may_be_nan(name):
    held = np.isin(np.arange(60), np.concatenate([roster.rows for roster in DEALS]))
    assert not held[0]  # the row that padding reads
    poisoned = DATA._replace(image=jnp.where(held[:, None, None, None], DATA.image, jnp.nan))
    same(federation(name).run(data=poisoned)[-1], history(name)[-1])


def test_permuting_clients_changes_no_prediction(name):
    if name in ("icarl", "fppl"):
        pytest.skip("a client's number decides what it draws from its memory and where its prototypes lie")
    order = [3, 2, 0, 1]
    renamed = []
    for roster in DEALS:
        owned = np.split(roster.rows, roster.offset[1:-1])
        renamed.append(toys.make_roster([owned[i] for i in order], LABEL, SETTING.classes))
    server, expected = federation(name).run(deals=renamed)[-1][0], history(name)[-1][0]
    close(*(predict(name, each, STREAM[1]) for each in (server, expected)), atol=2e-3)


def test_classes_not_seen_and_padding_classes_never_win(name):
    for (server, _), task in ((history(name)[1], STREAM[0]), (history(name)[3], STREAM[1])):
        logits = predict(name, server, task)
        assert logits.shape == (60, SETTING.classes) and np.all(np.isfinite(logits))
        assert set(np.argmax(logits, axis=-1).tolist()) <= set(np.flatnonzero(task.seen).tolist())


def test_all_rounds_of_all_tasks_share_one_trace(name):
    history(name)
    assert set(federation(name).engine.traces.values()) == {1}


def test_the_next_task_starts_where_the_last_one_ended_and_replays_bit_for_bit(name):
    same(federation(name).run()[-1], history(name)[-1])


@pytest.mark.parametrize("method", ["joint", "fedclm", "ewc", "lwf", "icarl"])
def test_one_client_with_all_rows_trains_as_a_plain_loop_would(method):
    """In the first task, where the baselines' own terms are 0: optax on unpadded batches, written from the
    definition of LoRA."""
    rows = np.flatnonzero(STREAM[0].current[LABEL])[1:15]
    alone = toys.make_roster([rows, rows[:0], rows[:0], rows[:0]], LABEL, SETTING.classes)
    made = federation(method)
    engine = engine_of(made.method, Lanes(1, "loop"), [alone])
    received, _ = receive(engine, 0, made.start, made.states, alone, [0], STREAM[0])
    trained = jax.tree.map(lambda x: x / received.weight[0], received.mean)

    def loss(tuned, image, label):
        lora, head = tuned
        injection = Injection(lora={m: jax.tree.map(lambda leaf, m=m: leaf[m], lora) for m in range(2)})
        logits = apply_vit(TINY, FROZEN.network, image, injection).cls @ head.kernel + head.bias
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :3], label))

    pairs, head, _ = made.start.params
    head = head.inner if method == "fedclm" else head
    tuned = (jax.tree.map(lambda leaf: leaf[0], pairs), head)  # the one pair of the stream
    adam = optax.adam(RATE)
    optimiser, gradient_of = adam.init(tuned), jax.jit(jax.grad(loss))
    for epoch in range(2):
        order = toys.epoch_order(toys.fold(KEY, STREAM[0].index, 0), 0, epoch, rows)
        for batch in np.split(order, range(4, len(rows), 4)):
            update, optimiser = adam.update(
                gradient_of(tuned, DATA.image[batch], DATA.label[batch]), optimiser
            )
            tuned = optax.apply_updates(tuned, update)
    close((trained.adapter, trained.classifier), tuned, atol=RATE / 20)
    assert float(jnp.max(jnp.abs(tuned[1].kernel - head.kernel))) > 3 * RATE  # it did train
