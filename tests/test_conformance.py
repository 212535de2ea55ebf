"""What every method must hold, one test body for all of them, on a tiny ViT with four clients, one of them
without rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from toys import KEY, close, receive, same

from fcljax.data.tasks import make_tasks
from fcljax.federated.engine import Lanes, extra_method, init_clients, make_engine, run_round
from fcljax.federated.schedule import Roster, capacity
from fcljax.methods import METHODS, resolve_options
from fcljax.models.vit import Injection, ViTConfig, apply_vit, init_vit, vit_backbone
from fcljax.types import Setting

TINY = ViTConfig(image_size=8, patch=4, width=16, depth=2, heads=2, mlp=32)
SETTING = Setting(
    classes=5, tasks=2, task_classes=3, clients=4, rounds=2
)  # the second task has two classes and a padding class
STREAM = make_tasks(5, 2)
RATE = 1e-3
PROMPTS = {"prompt_length": 3, "prompt_blocks": 2}
LORA = {"lora_lr": RATE, "lora_blocks": 2}
OPTIONS = {
    "fppl": PROMPTS | {"server_epochs": 2}, "fedavg": PROMPTS, "linear": {}, "pilora": LORA, "fedncm": {}, "fedclm": LORA, "joint": LORA,
    "ewc": LORA, "lwf": LORA, "icarl": LORA | {"memory_size": 6},
}  # fmt: skip
STATEFUL = {"fedncm", "ewc", "lwf", "icarl"}
FROZEN = init_vit(jax.random.key(1), TINY)


def read(data, index, keys, augment):
    return data.image[index], data.label[index], None


def deal(label, task, counts) -> Roster:
    mine = np.flatnonzero(task.current[label])[1 : 1 + sum(counts)]
    return toys.make_roster(np.split(mine, np.cumsum(counts)[:-1]), label, SETTING.classes)


LABEL = np.arange(60) % SETTING.classes
DATA = toys.Rows(
    jnp.asarray(np.random.default_rng(0).normal(size=(60, 8, 8, 3)), jnp.float32),
    jnp.asarray(LABEL, jnp.int32),
)
DEALS = [deal(LABEL, task, (9, 0, 4, 7)) for task in STREAM]


class Federation:
    """A method with its engines, all made once."""

    def __init__(self, name):
        options = resolve_options(name, METHODS[name].options(**OPTIONS[name]), "intended")
        self.method = METHODS[name].build(options, SETTING, vit_backbone(TINY), 2, 4, RATE)
        self.engine = self.build(self.method, Lanes(2, "vmap"))
        extras = {"opening": self.method.opening, "closing": self.method.closing}
        self.extras = {
            when: self.build(extra_method(self.method, extra), Lanes(2, "vmap"))
            for when, extra in extras.items()
            if extra
        }
        self.start = jax.jit(self.method.init)(jax.random.key(2), FROZEN)
        self.begin = jax.jit(self.method.begin_task)

    def build(self, method, lanes):
        return make_engine(method, read, lanes, capacity(method.client, DEALS, lanes.count, 128))

    @functools.cached_property
    def states(self):
        return init_clients(self.method, self.start, SETTING.clients, KEY)

    def run(self, deals=DEALS, ids=None, data=DATA):
        """(server, states) after every round of both tasks, with whatever comes before and after the rounds
        of a task."""
        server, states, history = self.start, jax.tree.map(jnp.copy, self.states), []
        for task, roster in zip(STREAM, deals, strict=True):
            server = self.begin(server, task, KEY)
            everyone = np.flatnonzero(roster.count)
            for round_ in range(SETTING.rounds):
                if round_ == 0 and "opening" in self.extras:
                    server, states, _ = self.play("opening", server, states, data, roster, everyone, task, 0)
                chosen = everyone if ids is None else np.intersect1d(everyone, ids)
                server, states, _ = self.play(None, server, states, data, roster, chosen, task, round_)
                if round_ == SETTING.rounds - 1 and "closing" in self.extras:
                    server, states, _ = self.play("closing", server, states, data, roster, everyone, task, 0)
                history.append(jax.tree.map(jnp.copy, (server, states)))
        return history

    def play(self, when, server, states, data, roster, ids, task, round_):
        engine = self.extras.get(when, self.engine)
        return run_round(engine, FROZEN, server, states, data, roster, ids, task, round_, jax.random.key(3))


@functools.cache
def federation(name):
    return Federation(name)


@functools.cache
def history(name):
    return federation(name).run()


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
    made, (server, states) = federation(name), history(name)[1]
    play = lambda ids: receive(made.engine, FROZEN, server, states, DATA, DEALS[1], ids, STREAM[1])
    together, after = play([0, 2, 3])
    total = jax.tree.map(jnp.zeros_like, (together.mean, together.sum))
    for rank, client in enumerate([0, 2, 3]):
        alone, its = play([client])
        same(
            jax.tree.map(lambda x: x[0], alone.gather), jax.tree.map(lambda x, i=rank: x[i], together.gather)
        )
        same(jax.tree.map(lambda x, i=client: x[i], its), jax.tree.map(lambda x, i=client: x[i], after))
        total = jax.tree.map(jnp.add, total, (alone.mean, alone.sum))
    close(total, (together.mean, together.sum), atol=1e-4)


def test_uploads_do_not_depend_on_lanes(name):
    made, (server, states) = federation(name), history(name)[1]
    single = made.build(made.method, Lanes(1, "loop"))
    two, one = (
        receive(engine, FROZEN, server, states, DATA, DEALS[1], [0, 2, 3], STREAM[1])
        for engine in (made.engine, single)
    )
    # A student that still equals its teacher has a gradient of nothing but rounding, of which Adam makes
    # whole steps.
    steps = RATE * 6 * float(jnp.sum(two[0].weight)) if name == "lwf" else 1e-3
    close((two[0].mean, two[0].sum, two[0].gather), (one[0].mean, one[0].sum, one[0].gather), atol=steps)
    assert two[0].valid.tolist() == one[0].valid.tolist() and two[0].id.tolist() == one[0].id.tolist()


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
        pytest.skip(
            "what a client draws from its memory, and where its prototypes lie in the pool, belongs to its number"
        )
    order = [3, 2, 0, 1]
    renamed = []
    for roster in DEALS:
        owned = np.split(roster.rows, roster.offset[1:-1])
        renamed.append(toys.make_roster([owned[i] for i in order], LABEL, SETTING.classes))
    server, expected = federation(name).run(deals=renamed)[-1][0], history(name)[-1][0]
    predict = jax.jit(federation(name).method.predict)
    close(*(predict(FROZEN, s, DATA.image, None, STREAM[1]) for s in (server, expected)), atol=2e-3)


def test_classes_not_seen_and_padding_classes_never_win(name):
    predict = jax.jit(federation(name).method.predict)
    for (server, _), task in ((history(name)[1], STREAM[0]), (history(name)[3], STREAM[1])):
        logits = predict(FROZEN, server, DATA.image, None, task)
        assert logits.shape == (60, SETTING.classes) and np.all(np.isfinite(logits))
        assert set(np.argmax(logits, axis=-1).tolist()) <= set(np.flatnonzero(task.seen).tolist())


def test_all_rounds_of_all_tasks_share_one_trace(name):
    history(name)
    for engine in (federation(name).engine, *federation(name).extras.values()):
        assert set(engine.traces.values()) == {1}


def test_the_next_task_starts_where_the_last_one_ended_and_replays_bit_for_bit(name):
    same(federation(name).run()[-1], history(name)[-1])


@pytest.mark.parametrize("method", ["joint", "fedclm", "ewc", "lwf", "icarl"])
def test_one_client_with_all_rows_trains_as_a_plain_loop_would(method):
    """In the first task, where the baselines' own terms are 0: optax on unpadded batches, written from the
    definition of LoRA."""
    rows = np.flatnonzero(STREAM[0].current[LABEL])[1:15]
    alone = toys.make_roster([rows, rows[:0], rows[:0], rows[:0]], LABEL, SETTING.classes)
    made = federation(method)
    engine = make_engine(made.method, read, Lanes(1, "loop"), capacity(made.method.client, [alone], 1, 128))
    received, _ = receive(engine, FROZEN, made.start, made.states, DATA, alone, [0], STREAM[0])
    trained = jax.tree.map(lambda x: x / received.weight[0], received.mean)

    def loss(tuned, image, label):
        injection = Injection(lora={m: jax.tree.map(lambda leaf, m=m: leaf[m], tuned.lora) for m in range(2)})
        logits = apply_vit(TINY, FROZEN, image, injection).cls @ tuned.head.kernel + tuned.head.bias
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :3], label))

    tuned = made.start.tuned if method == "fedclm" else made.start
    adam = optax.adam(RATE)
    optimiser, gradient_of = adam.init(tuned), jax.jit(jax.grad(loss))
    for epoch in range(2):
        order = toys.epoch_order(toys.fold(KEY, STREAM[0].index, 0), 0, epoch, rows)
        for batch in np.split(order, range(4, len(rows), 4)):
            update, optimiser = adam.update(
                gradient_of(tuned, DATA.image[batch], DATA.label[batch]), optimiser
            )
            tuned = optax.apply_updates(tuned, update)
    close(trained, tuned, atol=RATE / 20)
    start = made.start.tuned if method == "fedclm" else made.start
    assert float(jnp.max(jnp.abs(tuned.head.kernel - start.head.kernel))) > 3 * RATE  # it did train
