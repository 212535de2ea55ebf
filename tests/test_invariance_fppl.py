"""What must not matter to FPPL: lanes, the order of clients, who else takes part, what lies in masked rows.

Not ported yet: this is the FPPL section of test_invariance.py as it was under the old protocol.
"""

import collections

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from toys import KEY, close, receive, same

from fcljax.adapters.prompts import fuse, prompt_injection
from fcljax.data.tasks import make_tasks
from fcljax.federated.engine import Lanes, init_clients, make_engine, run_round
from fcljax.federated.schedule import Roster, capacity
from fcljax.methods import resolve_options
from fcljax.methods.fppl import FPPLConfig, fppl
from fcljax.models.heads import cosine
from fcljax.models.vit import ViTConfig, apply_vit, init_vit, vit_backbone
from fcljax.types import Setting


def one(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def owned_rows(roster: Roster) -> list[np.ndarray]:
    return np.split(roster.rows, roster.offset[1:-1])


# ---- FPPL --------------------------------------------------------------------------------------------------

TINY = ViTConfig(image_size=8, patch=4, width=16, depth=2, heads=2, mlp=32)
SETTING = Setting(
    classes=5, tasks=2, task_classes=3, clients=4
)  # the second task has two classes and a padding class
STREAM = make_tasks(5, 2)
OPTIONS = resolve_options("fppl", FPPLConfig(prompt_length=3, prompt_blocks=2, server_epochs=2), "intended")
EPOCHS, BATCH, RATE = 2, 4, 1e-3


def read(data, index, keys, augment):
    return data.image[index], data.label[index], None


def sizes_to_roster(label, task, counts) -> Roster:
    mine = np.flatnonzero(task.current[label])[1 : 1 + sum(counts)]
    return toys.make_roster(np.split(mine, np.cumsum(counts)[:-1]), label, SETTING.classes)


class Federation:
    """FPPL on a tiny ViT: data, rosters, and two compiled engines for all tests below."""

    def __init__(self):
        rng = np.random.default_rng(0)
        label = np.arange(60) % SETTING.classes
        self.data = toys.Rows(
            jnp.asarray(rng.normal(size=(60, 8, 8, 3)), jnp.float32), jnp.asarray(label, jnp.int32)
        )
        self.deals = [sizes_to_roster(label, task, (9, 0, 4, 7)) for task in STREAM]
        self.alone = sizes_to_roster(label, STREAM[1], (22, 0, 0, 0))
        self.frozen = init_vit(jax.random.key(1), TINY)
        self.method = fppl(OPTIONS, SETTING, vit_backbone(TINY), EPOCHS, BATCH, RATE)
        self.traces = collections.Counter()  # of what a client does, in the first engine
        client = self.method.client
        counted = client._replace(
            start=self.counted("start", client.start),
            phases=tuple(phase._replace(step=self.counted("step", phase.step)) for phase in client.phases),
            finish=self.counted("finish", client.finish),
        )
        chex.clear_trace_counter()
        once = chex.assert_max_traces(n=1)
        server, broadcast = once(self.method.server), once(self.method.broadcast)
        self.engine = self.build(
            Lanes(2, "vmap"), self.method._replace(client=counted, server=server, broadcast=broadcast)
        )
        self.one_lane = self.build(Lanes(1, "loop"), self.method)
        self.start = jax.jit(self.method.init)(jax.random.key(2), self.frozen)
        self.states = init_clients(self.method, self.start, SETTING.clients, KEY)

    def counted(self, name, function):
        def call(*args):
            self.traces[name] += 1
            return function(*args)

        return call

    def build(self, lanes, method):
        return make_engine(
            method, read, lanes, capacity(method.client, [*self.deals, self.alone], lanes.count, 128)
        )

    def receive(self, engine, server, roster, ids, task=STREAM[0], data=None):
        data = self.data if data is None else data
        return receive(engine, self.frozen, server, self.states, data, roster, ids, task)[0]

    def run(self, deals, rounds=2, data=None):
        """Servers after every round of every task."""
        server, data, servers = self.start, self.data if data is None else data, []
        for task, roster in zip(STREAM, deals, strict=True):
            server = jax.jit(self.method.begin_task)(server, task, KEY)
            for round_ in range(rounds):
                ids = np.flatnonzero(roster.count)
                server, _, _ = run_round(
                    self.engine,
                    self.frozen,
                    server,
                    self.states,
                    data,
                    roster,
                    ids,
                    task,
                    round_,
                    jax.random.key(3),
                )
                servers.append(server)
        return servers


@pytest.fixture(scope="module")
def federation():
    return Federation()


@pytest.fixture(scope="module")
def servers(federation):
    return federation.run(federation.deals)


def test_fppl_prompts_of_an_earlier_task_stay_bit_for_bit_while_the_current_one_learns(servers, federation):
    first, second = servers[1].prompts, servers[3].prompts
    same(second[0], first[0])
    assert np.any(np.asarray(second[1]) != np.asarray(first[0]))  # prompt transfer: it started from task 0's
    assert np.any(np.asarray(first[0]) != np.asarray(federation.start.prompts[0]))


def test_fppl_frozen_prompt_slots_get_a_gradient_of_exactly_zero(federation, servers):
    """Through the whole network: only the current task's prompt is trained, although both are fused."""

    def loss(prompts, current, task):
        fused = fuse(jnp.full((3, 2), 0.5), prompts, current, task)
        feature = apply_vit(TINY, federation.frozen, federation.data.image[:3], prompt_injection(fused)).cls
        return jnp.sum(feature[:, :3] ** 2)

    server = servers[-1]
    by_prompts, by_current = jax.jit(jax.grad(loss, argnums=(0, 1)))(server.prompts, server.prompts[1], 1)
    assert np.all(np.asarray(by_prompts) == 0)
    assert np.any(np.asarray(by_current) != 0)


def test_fppl_classes_not_seen_and_padding_classes_never_win(federation, servers):
    predict = jax.jit(federation.method.predict)
    for server, task in ((servers[1], STREAM[0]), (servers[3], STREAM[1])):
        tempting = server._replace(head=server.head._replace(bias=server.head.bias + 1e6 * ~task.seen))
        logits = predict(federation.frozen, tempting, federation.data.image, None, task)
        assert logits.shape == (60, SETTING.classes) and np.all(np.isfinite(logits))
        assert set(np.argmax(logits, axis=-1).tolist()) <= set(np.flatnonzero(task.seen).tolist())


def test_fppl_is_traced_in_the_first_round_only(federation, servers):
    """What a client does is traced for its shapes and for the loop, but never again in later rounds and
    tasks."""
    assert set(federation.engine.traces.values()) == {1}
    before = dict(federation.traces)
    assert set(before) == {"start", "step", "finish"}
    same(federation.run(federation.deals)[-1], servers[-1])
    assert federation.traces == before
    assert set(federation.engine.traces.values()) == {1}


def test_fppl_uploads_do_not_depend_on_who_else_takes_part(federation, servers):
    together = federation.receive(federation.engine, servers[1], federation.deals[1], [0, 2, 3], STREAM[1])
    for rank, client in enumerate([0, 2, 3]):
        alone = federation.receive(federation.engine, servers[1], federation.deals[1], [client], STREAM[1])
        same(one(alone.gather, 0), one(together.gather, rank))


def test_fppl_uploads_do_not_depend_on_lanes(federation, servers):
    two, single = (
        federation.receive(engine, servers[1], federation.deals[1], [0, 2, 3], STREAM[1])
        for engine in (federation.engine, federation.one_lane)
    )
    close(two.gather, single.gather, atol=1e-4)
    close(two.mean, single.mean, atol=1e-4)
    assert two.valid.tolist() == single.valid.tolist() and two.id.tolist() == single.id.tolist()


def test_fppl_rows_that_nobody_holds_may_be_nan(federation, servers):
    held = np.isin(np.arange(60), np.concatenate([deal.rows for deal in federation.deals]))
    assert not held[0]  # the row that padding reads
    image = jnp.where(held[:, None, None, None], federation.data.image, jnp.nan)
    same(federation.run(federation.deals, data=toys.Rows(image, federation.data.label)), servers)


def test_fppl_permuting_clients_permutes_the_pool_and_nothing_else(federation, servers):
    order = [3, 2, 0, 1]
    label = np.asarray(federation.data.label)
    renamed = [
        toys.make_roster([owned_rows(deal)[i] for i in order], label, SETTING.classes)
        for deal in federation.deals
    ]
    server, expected = federation.run(renamed, rounds=1)[0], servers[0]
    close((server.prompts, server.gate), (expected.prompts, expected.gate), atol=1e-5)
    close(server.pool, one(expected.pool, np.array(order)), atol=1e-5)


def test_fppl_with_one_client_that_holds_all_rows_is_centralised_training(federation):
    """A plain optax loop on unpadded batches, written from the paper's equations, against the upload of the
    only client."""
    task, start, rows = STREAM[1], federation.start, federation.alone.rows
    received = federation.receive(federation.engine, start, federation.alone, [0], task)
    trained = jax.tree.map(lambda x: x / received.weight[0], received.mean)
    assert len(rows) % BATCH and float(received.weight[0]) == len(rows)

    def loss(parameters, image, label):
        prompt, psi, sigma, kernel, bias = parameters
        gate = jax.nn.softmax(
            sigma * cosine(apply_vit(TINY, federation.frozen, image).cls, psi)
        )  # both tasks are seen
        fused = jnp.einsum("bt,tmld->bmld", gate, jnp.stack([start.prompts[0], prompt]))
        logits = apply_vit(TINY, federation.frozen, image, prompt_injection(fused)).cls @ kernel + bias
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, 3:5], label - 3))

    parameters = (start.prompts[1], start.gate.psi, start.gate.sigma, start.head.kernel, start.head.bias)
    adam = optax.adam(RATE)
    optimiser, gradient_of = adam.init(parameters), jax.jit(jax.grad(loss))
    for epoch in range(EPOCHS):
        order = toys.epoch_order(toys.fold(KEY, task.index, 0), 0, epoch, rows)
        for batch in np.split(order, range(BATCH, len(rows), BATCH)):
            gradient = gradient_of(parameters, federation.data.image[batch], federation.data.label[batch])
            update, optimiser = adam.update(gradient, optimiser)
            parameters = optax.apply_updates(parameters, update)
    close((trained.prompt, trained.gate.psi, trained.gate.sigma, *trained.head), parameters, atol=1e-5)
    assert float(jnp.max(jnp.abs(parameters[0] - start.prompts[1]))) > 5 * RATE  # it did train
