"""What must not matter to FPPL: lanes, order of clients, who else takes part, what lies in masked rows."""

import collections

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from micro import (
    DATA,
    FROZEN,
    KEY,
    LABEL,
    PARTITIONS,
    SIZES,
    STREAM,
    TINY,
    begin,
    compiled,
    engine_of,
    method_of,
    partition_of,
    play,
    receive,
    round_context_of,
)
from toys import close, same

from fcljax.adapters.prompts import fuse, prompt_injection
from fcljax.federated.engine import Lanes
from fcljax.federated.reference import epoch_order
from fcljax.models.heads import cosine
from fcljax.models.vit import apply_vit
from fcljax.types import Batch

EPOCHS, BATCH, RATE = 2, 4, 1e-3
OPTIONS = dict(epochs=EPOCHS, batch_size=BATCH, lr=RATE, prompt_length=3, prompt_blocks=2, server_epochs=2)
ALONE = partition_of(STREAM[1], (22, 0, 0, 0))


def one(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def owned_rows(partition):
    return np.split(partition.indices, partition.offset[1:-1])


def prompts_of(server):
    return server.params.adapter.prompt


class Federation:
    """FPPL on a tiny ViT with two compiled engines for all tests below."""

    def __init__(self):
        self.method = method_of("fppl", **OPTIONS)
        self.traces = collections.Counter()  # of what a client does, in the first engine
        (main,) = self.method.rounds
        client = main.program
        counted = client._replace(
            start=self.counted("start", client.start),
            phases=tuple(phase._replace(step=self.counted("step", phase.step)) for phase in client.phases),
            finish=self.counted("finish", client.finish),
        )
        chex.clear_trace_counter()
        # once for the shapes when the engine is made, and once to compile
        twice = chex.assert_max_traces(n=2)
        server = main.server

        def step_of_server(*args):
            return server(*args)

        main = main._replace(program=counted, server=twice(step_of_server))
        partitions = [*PARTITIONS, ALONE]
        self.engine = engine_of(
            self.method._replace(rounds=(main,), broadcast=twice(self.broadcast)), partitions=partitions
        )
        self.one_lane = engine_of(self.method, Lanes(1, "loop"), partitions)
        self.start, self.states = begin(self.method)

    def broadcast(self, *args):
        return self.method.broadcast(*args)

    def counted(self, name, function):
        def call(*args):
            self.traces[name] += 1
            return function(*args)

        return call

    def receive(self, engine, server, partition, ids, task):
        return receive(engine, 0, server, self.states, partition, ids, task)[0]

    def run(self, partitions=PARTITIONS, rounds=2, data=DATA):
        """Servers after every round of every task."""
        history = play(self.engine, self.start, self.states, partitions, data=data, rounds=rounds)
        return [server for server, _, _ in history]


@pytest.fixture(scope="module")
def federation():
    return Federation()


@pytest.fixture(scope="module")
def servers(federation):
    return federation.run()


def test_prompts_of_an_earlier_task_stay_bit_for_bit_while_the_current_one_learns(servers, federation):
    first, second = prompts_of(servers[1]), prompts_of(servers[3])
    same(second[0], first[0])
    assert np.any(np.asarray(second[1]) != np.asarray(first[0]))  # prompt transfer: it started from task 0's
    assert np.any(np.asarray(first[0]) != np.asarray(prompts_of(federation.start)[0]))


def test_frozen_prompt_slots_get_a_gradient_of_exactly_zero(servers):
    """Through the whole network: only the current task's prompt is trained, although both are fused."""

    def loss(prompts, current, task):
        fused = fuse(jnp.full((3, 2), 0.5), prompts, current, task)
        feature = apply_vit(TINY, FROZEN.network, DATA.input[:3], prompt_injection(fused)).cls
        return jnp.sum(feature[:, :3] ** 2)

    prompts = prompts_of(servers[-1])
    by_prompts, by_current = jax.jit(jax.grad(loss, argnums=(0, 1)))(prompts, prompts[1], jnp.int32(1))
    assert np.all(np.asarray(by_prompts) == 0)
    assert np.any(np.asarray(by_current) != 0)


def test_classes_not_seen_and_padding_classes_never_win(federation, servers):
    nothing = jnp.zeros(len(LABEL), jnp.int32)
    rows = Batch(DATA.input, nothing, nothing == 0, nothing)
    for server, task in ((servers[1], STREAM[0]), (servers[3], STREAM[1])):
        head = server.params.classifier
        tempting = server.params._replace(classifier=head._replace(bias=head.bias + 1e6 * ~task.seen))
        predict = compiled(federation.method.predict)
        logits = predict(round_context_of(task), server._replace(params=tempting), rows)
        assert logits.shape == (60, SIZES.classes) and np.all(np.isfinite(logits))
        assert set(np.argmax(logits, axis=-1).tolist()) <= set(np.flatnonzero(task.seen).tolist())


def test_everything_is_traced_in_the_first_round_only(federation, servers):
    """What a client does is traced for its shapes and for the loop, but never again in later rounds and
    tasks."""
    assert set(federation.engine.traces.values()) == {1}
    before = dict(federation.traces)
    assert set(before) == {"start", "step", "finish"}
    same(federation.run()[-1], servers[-1])
    assert federation.traces == before
    assert set(federation.engine.traces.values()) == {1}


def test_uploads_do_not_depend_on_who_else_takes_part(federation, servers):
    together = federation.receive(federation.engine, servers[1], PARTITIONS[1], [0, 2, 3], STREAM[1])
    for rank, client in enumerate([0, 2, 3]):
        alone = federation.receive(federation.engine, servers[1], PARTITIONS[1], [client], STREAM[1])
        same(one(alone.gather, 0), one(together.gather, rank))


@pytest.mark.long
def test_uploads_do_not_depend_on_lanes(federation, servers):
    two, single = (
        federation.receive(engine, servers[1], PARTITIONS[1], [0, 2, 3], STREAM[1])
        for engine in (federation.engine, federation.one_lane)
    )
    close(two.gather, single.gather, atol=1e-4)
    close(two.mean, single.mean, atol=1e-4)
    assert two.valid.tolist() == single.valid.tolist() and two.id.tolist() == single.id.tolist()


def test_rows_that_nobody_holds_may_be_nan(federation, servers):
    held = np.isin(np.arange(60), np.concatenate([partition.indices for partition in PARTITIONS]))
    assert not held[0]  # the row that padding reads
    image = jnp.where(held[:, None, None, None], DATA.input, jnp.nan)
    same(federation.run(data=DATA._replace(input=image)), servers)


def test_permuting_clients_permutes_the_pool_and_nothing_else(federation, servers):
    order = [3, 2, 0, 1]
    renamed = [
        toys.make_partition([owned_rows(partition)[i] for i in order], LABEL, SIZES.classes)
        for partition in PARTITIONS
    ]
    server, expected = federation.run(renamed, rounds=1)[0], servers[0]
    close(server.params.adapter, expected.params.adapter, atol=1e-5)
    (pool,), (its,) = server.rules, expected.rules
    close(pool, one(its, np.array(order)), atol=1e-5)


@pytest.mark.long
def test_one_client_that_holds_all_rows_is_centralised_training(federation):
    """A plain optax loop on unpadded batches, written from the paper's equations, against the upload of the
    only client."""
    task, server, rows = STREAM[1], federation.start, ALONE.indices
    received = federation.receive(federation.engine, server, ALONE, [0], task)
    trained = jax.tree.map(lambda x: x / received.weight[0], received.mean)
    assert len(rows) % BATCH and float(received.weight[0]) == len(rows)
    (prompts, gate), head, *_ = server.params

    def loss(parameters, image, label):
        prompt, psi, sigma, kernel, bias = parameters
        query = apply_vit(TINY, FROZEN.network, image).cls
        weights = jax.nn.softmax(sigma * cosine(query, psi))  # both tasks are seen
        fused = jnp.einsum("bt,tmld->bmld", weights, jnp.stack([prompts[0], prompt]))
        logits = apply_vit(TINY, FROZEN.network, image, prompt_injection(fused)).cls @ kernel + bias
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, 3:5], label - 3))

    parameters = (prompts[1], gate.psi, gate.sigma, *head)
    adam = optax.adam(RATE)
    optimiser, gradient_of = adam.init(parameters), jax.jit(jax.grad(loss))
    for epoch in range(EPOCHS):
        order = epoch_order(toys.fold(KEY, task.index, 0), 0, epoch, rows)
        for batch in np.split(order, range(BATCH, len(rows), BATCH)):
            gradient = gradient_of(parameters, DATA.input[batch], DATA.label[batch])
            update, optimiser = adam.update(gradient, optimiser)
            parameters = optax.apply_updates(parameters, update)
    pair = trained.adapter
    close((pair.prompt, pair.gate.psi, pair.gate.sigma, *trained.classifier), parameters, atol=1e-5)
    assert float(jnp.max(jnp.abs(parameters[0] - prompts[1]))) > 5 * RATE  # it did train
