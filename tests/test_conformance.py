"""The invariants of every method, one test body for all of them, on a tiny ViT with four clients, one of them
without examples: the statements of `fcljax check`, and what only a test can say."""

import functools
import itertools
import random

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
    SIZES,
    STREAM,
    TINY,
    compiled,
    engine_of,
    method_of,
    receive,
    round_context_of,
)
from small_runs import some
from toys import close, same

from fcljax import config
from fcljax.checks import conformance, tracing
from fcljax.checks import federation as tiny
from fcljax.checks.examples import images, kind_of, network, tiny_data
from fcljax.federated.engine import Lanes
from fcljax.federated.reference import epoch_order
from fcljax.methods import METHODS, MethodEntry
from fcljax.models.vit import Injection, apply_vit
from fcljax.parts.client import ClientRule
from fcljax.parts.federate import federate, linear_learner
from fcljax.parts.learner import Loss, cross_entropy_loss
from fcljax.parts.server import ServerRule, ServerUpdate
from fcljax.runs.build import make_method
from fcljax.settings import NoOptions
from fcljax.types import Batch

RATE = 1e-3
PROMPTS = {"prompt_length": 3, "prompt_blocks": 2}
LORA = {"lora_lr": RATE, "lora_blocks": 2}
POOL = {"pool_size": 3, "pool_length": 2, "pool_blocks": 2}
PMAE = {"restore_images": 2, "recon_length": 2, "tune_epochs": 1, "tune_batch": 8}
SGD = {"lr": 0.05, "lora_lr": 0.05}  # their own optimiser, whose steps are smaller than the rate
GENERATOR = {"generator_steps": 2, "synthetic_batch": 4, "generator_channels": 4, "noise_width": 4}
REHEARSED = {"memory_size": 6, "match_steps": 2, "prototype_steps": 2, "monitor_images": 2, "full_lr": RATE}
OPTIONS = {
    "fppl": PROMPTS | {"server_epochs": 2},
    "fedavg": PROMPTS,
    "linear": {},
    "pilora": LORA,
    "fedncm": {},
    "zero-shot": {},
    "promptfl": {"context_length": 2},
    "fedtpg": {"context_length": 2, "generator_heads": 2},
    "afcl": {},
    "fedranpac": {"projection": 24},
    "stsa": {"projection": 24, "statistics": "first", "dummy_clients": 2},
    "ccvr": LORA | {"calibration_epochs": 2, "virtual_features": 8},
    "fedran": {"projection": 24, "rank": 6, "server_rank": 12, "labelled": 0.5},
    "lorm": LORA,
    "regmean": LORA,
    "fed-talora": LORA,
    "dolfin": LORA,
    "fot": LORA,
    "fedknow": LORA,
    "fedslca": {"full_lr": RATE, "align_epochs": 2, "align_samples": 8},
    "scaffold": LORA | SGD,
    "feddyn": LORA | SGD,
    "fedper": LORA,
    "ditto": LORA,
    "fedproto": LORA,
    "fedclm": LORA,
    **dict.fromkeys(("joint", "centralised", "sequential", "local", "ffa-lora"), LORA),
    "ewc": LORA | SGD,
    "lwf": LORA | SGD,
    "icarl": LORA | SGD | {"memory_size": 6},
    "hepco": POOL | {"generator_steps": 2, "generator_growth": 1, "distill_steps": 2, "latent_batch": 6},
    "fedavg-prompt": POOL,
    "fedprox": POOL,
    "fed-cprompt": POOL,
    "fedavg-ft": {},
    "fedlwf-mc": {},
    "cfed": {"server_steps": 2, "server_batch": 6},
    "target": GENERATOR
    | {"synthesis_rounds": 2, "synthesis_batch": 4, "synthesis_warmup": 1, "student_steps": 2},
    "mfcl": GENERATOR | {"generator_batch": 4},
    "lander": GENERATOR
    | {"synthesis_rounds": 2, "synthesis_batch": 4, "synthesis_warmup": 1, "student_steps": 2},
    "glfc": REHEARSED,
    "lga": REHEARSED,
    "centralized-prompt": POOL,
    "vfcl": {"lr": 0.01, "full_lr": 0.01, "init_std": 0.1, "rounds": 2, "exemplars": 2, "mc_test_samples": 2},
    "fedweit": {"rounds": 2, "kb_samples": 2, "full_lr": RATE},
    "fedrecon": {"adapter": "full", "full_lr": RATE},
    "l2p": {"l2p_size": 4, "l2p_length": 2, "l2p_top_k": 2},
    "dualprompt": {
        "dual_shared_length": 2,
        "dual_length": 3,
        "dual_shared_blocks": 1,
        "dual_blocks": 1,
    },
    "coda-prompt": {"coda_components": 4, "coda_length": 4, "coda_blocks": 2},
    "c2prompt": {"coda_components": 4, "coda_length": 4, "coda_blocks": 2, "compensation_epochs": 1},
    "pmae": PMAE | {"vpt_length": 2, "vpt_blocks": 2},
}
OPTIONS |= {f"{name}-pmae": PMAE | OPTIONS[name] for name in ("l2p", "dualprompt", "coda-prompt")}
STATEFUL = {"scaffold", "feddyn", "fedknow", "fedper", "ditto", "local"}  # clients' states change in a round
STATEFUL |= {"vfcl", "glfc", "lga", "fedweit", "c2prompt"}
EXAMPLES = ((9, 0, 4, 7),) * 2


@functools.cache
def federation(name):
    """A method with its engine, made once."""
    method = method_of(name, **{"epochs": 2, "batch_size": 4, "lr": RATE} | OPTIONS[name])
    return tiny.tiny_federation(method, images(TINY), EXAMPLES)


@functools.cache
def history(name):
    """The states after every round of both tasks."""
    return tiny.states_after_rounds(federation(name))


def predict(name, server, task):
    """Logits of all images."""
    nothing = jnp.zeros(len(LABEL), jnp.int32)
    rows = Batch(DATA.input, nothing, nothing == 0, nothing)
    return compiled(federation(name).method.predict)(round_context_of(task), server, rows)


# The others are made from the same parts.
@pytest.fixture(params=some(OPTIONS, ("scaffold",)))
def name(request):
    return request.param


def test_every_method_is_here():
    assert set(OPTIONS) == set(METHODS)


# That of lanes compiles every program again; toys' programs have it in the quick suite.
@pytest.mark.parametrize(
    "statement",
    some(
        conformance.STATEMENTS,
        [each for each in conformance.STATEMENTS if each is not conformance.lanes_do_not_matter],
    ),
    ids=lambda statement: statement.__name__,
)
def test_the_statement_holds(name, statement):
    found = statement(federation(name), history(name))
    assert found.holds, found


def reading_padding(method):
    """The method with a loss that counts every example of a batch, whatever the mask says."""

    def unmasked(phase):
        def step(context, local, batch, key):
            return phase.step(context, local, batch._replace(mask=jnp.ones_like(batch.mask)), key)

        return phase._replace(step=step)

    def of_round(each):
        phases = tuple(map(unmasked, each.program.phases))
        return each._replace(program=each.program._replace(phases=phases))

    return method._replace(rounds=tuple(map(of_round, method.rounds)))


def test_a_method_that_reads_padding_is_caught():
    broken = reading_padding(method_of("linear", epochs=2, batch_size=4, lr=RATE))
    made = tiny.tiny_federation(broken, images(TINY), EXAMPLES)
    found = conformance.padding_is_inert(made, tiny.states_after_rounds(made))
    assert not found.holds and "server/params/classifier/kernel" in found.found
    assert found.found.endswith("usual cause: batch.mask is not used")


def test_states_follow_the_client_and_those_who_are_absent_keep_theirs(name):
    made = federation(name)
    before, after = made.states, tiny.states_after_rounds(made, ids=[2])[0].clients
    row = lambda tree, client: jax.tree.map(lambda x: np.asarray(x[client]), tree)
    for client in (0, 1, 3):
        same(row(after, client), row(before, client))
    changed = [
        np.any(x != y)
        for x, y in zip(jax.tree.leaves(row(after, 2)), jax.tree.leaves(row(before, 2)), strict=True)
    ]
    assert any(changed) == (name in STATEFUL)


def test_classes_not_seen_and_padding_classes_never_win(name):
    for state, task in ((history(name)[1], STREAM[0]), (history(name)[3], STREAM[1])):
        logits = predict(name, state.server, task)
        assert logits.shape == (60, SIZES.classes) and np.all(np.isfinite(logits))
        assert set(np.argmax(logits, axis=-1).tolist()) <= set(np.flatnonzero(task.seen).tolist())


@pytest.mark.parametrize("method", ["joint", "fedclm", "ewc", "lwf", "icarl"])
@pytest.mark.long
def test_one_client_with_all_rows_trains_as_a_plain_loop_would(method):
    """In the first task, where the baselines' own terms are 0: optax on unpadded batches, written from the
    definition of LoRA."""
    rows = np.flatnonzero(STREAM[0].current[LABEL])[1:15]
    alone = toys.make_partition([rows, rows[:0], rows[:0], rows[:0]], LABEL, SIZES.classes)
    made = federation(method)
    engine = engine_of(made.method, Lanes(1, "loop"), [alone])
    received, _ = receive(engine, 0, made.server, made.states, alone, [0], STREAM[0])
    trained = jax.tree.map(lambda x: x / received.weight[0], received.mean)

    def loss(tuned, image, label):
        lora, head = tuned
        injection = Injection(lora={m: jax.tree.map(lambda leaf, m=m: leaf[m], lora) for m in range(2)})
        logits = apply_vit(TINY, FROZEN.network, image, injection).cls @ head.kernel + head.bias
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :3], label))

    pairs, head, *_ = made.server.params
    head = head.inner if method == "fedclm" else head
    tuned = (jax.tree.map(lambda leaf: leaf[0], pairs), head)  # the one pair of the stream
    rule = optax.adam(RATE)
    if method in ("ewc", "lwf", "icarl"):
        decay = 0.0 if method == "ewc" else 5e-4
        rule = optax.chain(optax.add_decayed_weights(decay), optax.sgd(SGD["lr"], momentum=0.9))
    optimiser, gradient_of = rule.init(tuned), jax.jit(jax.grad(loss))
    for epoch in range(2):
        order = epoch_order(toys.fold(KEY, STREAM[0].index, 0), 0, epoch, rows)
        for batch in np.split(order, range(4, len(rows), 4)):
            update, optimiser = rule.update(
                gradient_of(tuned, DATA.input[batch], DATA.label[batch]), optimiser, tuned
            )
            tuned = optax.apply_updates(tuned, update)
    close((trained.adapter, trained.classifier), tuned, atol=RATE / 20)
    assert float(jnp.max(jnp.abs(tuned[1].kernel - head.kernel))) > 3 * RATE  # it did train


# ---- other data than images --------------------------------------------------------------------------------

OTHER_DATA = {
    "tables": {"dataset": "wine"},
    "series": {"dataset": "npz:series.npz", "backbone": "conv1d"},
    "texts": {"dataset": "text"},
}
ON_OTHER_DATA = [
    "linear",
    "fedavg-ft",
    "ewc",
    "lwf",
    "icarl",
    "scaffold",
    "fedncm",
    "fedranpac",
    "afcl",
    "local",
]


def checked_on(kind, method="linear", **values):
    values = {"clients": 4, "batch_size": 4, "epochs": 2} | OTHER_DATA[kind] | values
    return config.resolve(config.from_mapping(method, values, "test"))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "images"),
        ({"dataset": "npz:images.npz"}, "images"),
        ({"dataset": "csv:table.csv"}, "tables"),
        ({"dataset": "npz:table.npz", "backbone": "mlp"}, "tables"),
        ({"dataset": "texts:letters.parquet"}, "texts"),
        *((values, kind) for kind, values in OTHER_DATA.items()),
    ],
)
def test_a_method_is_checked_on_data_of_the_kind_that_the_settings_name(values, kind):
    assert kind_of(config.resolve(config.from_mapping("linear", values, "test"))) == kind


@pytest.mark.parametrize(
    "kind",
    [
        "tables",
        pytest.param("series", marks=pytest.mark.long),
        pytest.param("texts", marks=pytest.mark.long),
    ],
)
def test_padding_of_other_data_than_images_is_caught(kind):
    data = tiny_data(checked_on(kind))
    for holds, change in ((True, lambda method: method), (False, reading_padding)):
        method = change(make_method(checked_on(kind), tiny.SIZES, data.network))
        made = tiny.tiny_federation(method, data)
        found = conformance.padding_is_inert(made, tiny.states_after_rounds(made))
        assert found.holds == holds, found


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *itertools.product(ON_OTHER_DATA, ("tables", "texts")),
        ("lorm", "texts"),  # LoRA acts inside attention
        *itertools.product(("fedavg-ft", "icarl", "fedranpac"), ("series",)),
    ],
)
@pytest.mark.long
def test_every_statement_holds_on_other_data_than_images(method, kind):
    values = {"lr": RATE}
    if method in ("fedncm", "fedranpac", "afcl"):
        values = {}
    wrong = [found for found in conformance.check(checked_on(kind, method, **values)) if not found.holds]
    assert not wrong, wrong


# ---- what a row that fails says ----------------------------------------------------------------------------


def made_of(loss=None, rule=None, server_rule=None):
    """The tiny federation of a linear classifier with a loss or a rule of a user's own."""

    def build(_options, run):
        return federate(
            run,
            linear_learner(run),
            loss=loss or cross_entropy_loss(),
            client_rules=(rule,) if rule else (),
            server_rules=(server_rule,) if server_rule else (),
        )

    entry = MethodEntry("a user's own", NoOptions, build, adapter="linear")
    values = {"clients": 4, "batch_size": 4, "epochs": 2}
    cfg = config.from_mapping(entry, values, "test")
    return tiny.tiny_federation(make_method(cfg, tiny.SIZES, network(TINY)), images(TINY))


@pytest.mark.parametrize(
    "draw",
    [random.random, np.random.normal],
    ids=["random", "numpy.random"],
)
@pytest.mark.long
def test_a_number_that_is_drawn_while_tracing_is_found(draw):
    def drawn_loss(_step, _memory):
        return jnp.float32(draw()) ** 2

    found = tracing.traces_are_the_same(made_of(rule=ClientRule("noise", loss=drawn_loss)), [])
    assert not found.holds and "test_conformance.py" in found.found and "drawn_loss()" in found.found
    fine = tracing.traces_are_the_same(made_of(), [])
    assert fine.holds, fine


@pytest.mark.long
def test_a_number_that_a_server_rule_draws_while_tracing_is_found():
    def update(_round, params, state):
        return ServerUpdate(jax.tree.map(lambda x: x + np.float32(random.random()), params), state)

    found = tracing.traces_are_the_same(made_of(server_rule=ServerRule("noise", update)), [])
    assert not found.holds and "update" in found.found


def test_programs_differ_wherever_a_constant_does():
    def differ(function):
        programs = [tracing._program(function, (jnp.ones(3),)) for _ in range(2)]
        return tracing.first_difference(*programs)

    def in_a_loop(x):
        return jax.lax.fori_loop(0, 3, lambda i, y: y * random.random(), x)

    def in_an_array(x):
        return x + np.random.normal(size=3)

    def plain(x):
        key = jax.random.key(3)
        return jax.lax.fori_loop(0, 3, lambda i, y: y * np.arange(3.0), x) + jax.random.normal(key, (3,))

    assert "in_a_loop" in differ(in_a_loop) and "in_an_array" in differ(in_an_array)
    assert differ(plain) is None


@pytest.mark.long
def test_a_loss_that_is_nan_is_found_though_states_stay_finite():
    def value(output, batch, task):
        plain = cross_entropy_loss().value(output, batch, task)
        return plain + jax.lax.stop_gradient(jnp.log(-1.0 - plain**2))

    made = made_of(loss=Loss(value))
    found = conformance.stays_finite(made, tiny.states_after_rounds(made))
    assert not found.holds and "loss was NaN or infinite in" in found.found


@pytest.fixture(scope="module")
def with_memo():
    """A federation whose clients have a state, and its states after every round."""
    made = made_of(rule=ClientRule("memo", init=lambda key, trainable: jnp.zeros(2)))
    return made, tiny.states_after_rounds(made)


def test_a_state_that_is_nan_names_leaf_and_rule(with_memo):
    made, history = with_memo
    spoiled = history[1]._replace(clients=jax.tree.map(lambda x: x * jnp.nan, history[1].clients))
    found = conformance.stays_finite(made, [history[0], spoiled])
    assert found.found.startswith(".clients[0] is NaN or infinite after round 2")
    assert found.found.endswith("of the client rule 'memo'")


def test_a_client_that_others_change_is_named_with_the_usual_cause(with_memo):
    """Its state counts how many clients take part, which it cannot know."""
    made, history = with_memo

    def receive_more(made, engine, index, state, partition, ids, task=tiny.TASKS[1]):
        received, states = tiny.receive(made, engine, index, state, partition, ids, task)
        return received, jax.tree.map(lambda x: x.at[2].add(len(ids)), states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conformance, "receive", receive_more)
        found = conformance.others_do_not_matter(made, history)
    assert found.found.startswith("client 2 keeps other numbers: ") and "client rule 'memo'" in found.found
    assert "usual cause: " in found.found
