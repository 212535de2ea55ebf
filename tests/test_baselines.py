"""The baselines of PILoRA's tables: their losses in closed form, and what a client remembers from one task to
the next."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import (
    DATA,
    FROZEN,
    LABEL,
    NETWORK,
    PARTITIONS,
    SIZES,
    STREAM,
    TASKS,
    TINY,
    context_of,
    engine_of,
    info_of,
    method_of,
    resolved,
    round_context_of,
)
from small_runs import COMMON
from test_conformance import federation, history
from toys import same

from fcljax import cli, config
from fcljax.adapters import find_adapter
from fcljax.federated.communication import num_bytes
from fcljax.federated.engine import Lanes, RoundInputs, run_round
from fcljax.methods.ewc import Anchor, EWCOptions, consolidate, elastic
from fcljax.models.heads import distillation
from fcljax.models.vit import apply_vit
from fcljax.parts.classifiers import Sums, linear, mean_logits
from fcljax.parts.client import ClientStep
from fcljax.parts.federate import Payload
from fcljax.parts.learner import Params, learner
from fcljax.parts.replay import Exemplars, draw_exemplars, keep_highest
from fcljax.parts.task_start import Start, distil_task_start, send_start_of_task, teacher
from fcljax.types import Batch, ClientContext, Weighted

KEY = jax.random.key(0)
PAIR = find_adapter("lora").build(
    config.part(find_adapter("lora").options, resolved("joint", lora_blocks=2)), SIZES, NETWORK
)
LEARNER = learner(NETWORK, PAIR, linear(TINY.width, SIZES.classes))


@pytest.fixture(scope="module")
def tuned():
    """A fresh pair and a classifier."""
    return jax.jit(LEARNER.init)(KEY, FROZEN)


def batch_of(rows):
    rows = np.asarray(rows)
    return Batch(DATA.input[rows], DATA.label[rows], jnp.ones(len(rows), bool), jnp.asarray(rows, jnp.int32))


@jax.jit
def forward(params, batch):
    task = STREAM[0]
    return LEARNER.forward(FROZEN, params, LEARNER.trainable(params, task), batch, task, False)


@jax.jit
def plain_features(image):
    """Those of the network as it was given."""
    return apply_vit(TINY, FROZEN.network, image).cls


def output_of(params, rows):
    """Features and logits of these rows."""
    return forward(params, batch_of(rows))


def in_task(task, trainable=None):
    """What a client can read that starts from these parameters."""
    return ClientContext(FROZEN, Payload(trainable, {}), (), task, info_of(SIZES.classes))


# ---- distillation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("student", "expected"), [([0.0, 0.0], 0.693147), ([2.0, 0.0], 0.582203)])
def test_distillation_by_hand(student, expected):
    """Specification C9: temperature 2, no factor T^2; at equal logits it is the teacher's entropy."""
    rows = lambda logits: jnp.array([[*logits, 50.0]] * 2)
    value = distillation(
        rows(student), rows([2.0, 0.0]), jnp.array([True, True, False]), jnp.array([True, False])
    )
    assert float(value) == pytest.approx(expected, abs=1e-6)


def test_distillation_without_old_classes_or_rows_is_zero_and_so_is_its_gradient():
    logits = jnp.array([[1.0, -2.0]])
    for allowed, mask in (([False, False], [True]), ([True, True], [False])):
        value, slope = jax.value_and_grad(distillation)(
            logits, logits + 1, jnp.array(allowed), jnp.array(mask)
        )
        assert float(value) == 0
        np.testing.assert_array_equal(slope, jnp.zeros_like(logits))


def test_the_teacher_gets_no_gradient():
    allowed, mask = jnp.ones(2, bool), jnp.ones(1, bool)
    slope = jax.grad(lambda teacher: distillation(jnp.array([[1.0, 0.0]]), teacher, allowed, mask))(
        jnp.array([[0.0, 3.0]])
    )
    np.testing.assert_array_equal(slope, [[0, 0]])


# ---- fine-tuning -------------------------------------------------------------------------------------------


def test_a_new_pair_changes_nothing_yet(tuned):
    plain = plain_features(DATA.input[:3])
    np.testing.assert_allclose(output_of(tuned, np.arange(3)).feature, plain, atol=1e-6)


def test_head_and_pair_have_rates_of_their_own():
    """Adam's first step has the size of the rate, wherever there is a gradient."""
    method = method_of("joint", lora_lr=1e-2, lr=1e-4, lora_blocks=2)
    server, (main,) = jax.jit(method.init)(KEY, FROZEN), method.rounds
    context = context_of(method, server, STREAM[0], info_of(SIZES.classes, 3), FROZEN)
    before = main.program.start(context, (), KEY)
    after, _ = jax.jit(main.program.phases[0].step)(context, before, batch_of([1, 2, 5]), KEY)
    (pair, head, *_), (old_pair, old_head, *_) = after.trainable, before.trainable
    largest = lambda new, old: max(
        float(jnp.max(jnp.abs(a - b)))
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    )
    assert largest(pair, old_pair) == pytest.approx(1e-2, rel=1e-2)
    assert largest(head, old_head) == pytest.approx(1e-4, rel=1e-2)
    moved = np.abs(np.asarray(head.bias - old_head.bias)) > 0
    assert moved.tolist() == STREAM[0].current.tolist()  # classes of other tasks have no gradient


@pytest.mark.parametrize(("method", "decay"), [("ewc", 0.0), ("lwf", 5e-4), ("icarl", 5e-4)])
def test_the_baselines_of_target_s_release_train_as_it_does(method, decay):
    cfg = resolved(method, scale="paper")
    found = cfg.optimiser, cfg.momentum, cfg.lr, cfg.lora_lr, cfg.weight_decay
    assert found == ("sgd", 0.9, 0.01, 0.01, decay)
    assert resolved(method, optimiser="adam").optimiser == "adam"  # which does not read the momentum


# ---- EWC ---------------------------------------------------------------------------------------------------


def three_of(value):
    """Three parameters, all of this value."""
    return Params(jnp.full(2, value), jnp.full(1, value))


def test_the_elastic_penalty_is_half_of_the_weighted_squares_and_nothing_in_the_first_task():
    """10 / 2 times 3 numbers of Fisher 2 that are 2 away."""
    rule = elastic(EWCOptions(10.0, 1.0), LEARNER, 4)
    anchor = Anchor(three_of(1.0), three_of(2.0), jnp.bool_(True))
    for task, expected in zip(TASKS, (0, 10 / 2 * 3 * 2 * 2**2), strict=True):
        step = ClientStep(LEARNER, in_task(task), three_of(3.0), None, None, KEY, three_of(3.0))
        assert float(rule.loss(step, anchor)) == expected


def test_a_client_that_joins_late_has_its_whole_fisher_and_others_mix_it_with_their_own():
    joined = lambda known: Anchor(three_of(0.0), three_of(4.0 if known else 0.0), jnp.bool_(known))
    for known, expected in ((False, 8.0), (True, 3 / 5 * 4 + 2 / 5 * 8)):
        later = consolidate(in_task(TASKS[1]), joined(known), three_of(7.0), three_of(8.0))
        found = float(later.trainable.adapter[0]), float(later.fisher.adapter[0])
        assert found == pytest.approx((7, expected))


@pytest.mark.long
def test_fisher_information_is_positive_and_limited_and_belongs_to_who_has_rows():
    for place in (1, 3):  # after each task
        (states,) = history("ewc")[place][1]
        for client in (0, 2, 3):
            leaves = [np.asarray(leaf[client]) for leaf in jax.tree.leaves(states.fisher)]
            assert max(leaf.max() for leaf in leaves) > 0 and min(leaf.min() for leaf in leaves) >= 0
            assert max(leaf.max() for leaf in leaves) <= 1e-4 * (1 + 1e-6)
        # client 1 has no rows
        assert all(np.all(np.asarray(leaf[1]) == 0) for leaf in jax.tree.leaves(states.fisher))
        assert states.measured.tolist() == [True, False, True, True]
    (after_a_round,) = history("ewc")[2][1]
    jax.tree.map(np.testing.assert_array_equal, after_a_round, history("ewc")[1][1][0])


@pytest.mark.long
def test_a_client_keeps_two_copies_of_what_it_trains_and_no_more():
    (state,) = jax.tree.map(lambda x: x[0], federation("ewc").states)
    assert num_bytes(state) == 2 * num_bytes(federation("ewc").server.params) + 1


# ---- LwF ---------------------------------------------------------------------------------------------------


def sent_in(task, start, newest):
    """What a client may read of a server that is in this task."""
    sent = {"start": send_start_of_task().sends(task, start)}
    return in_task(task)._replace(payload=Payload(newest, sent))


def test_the_teacher_is_the_model_before_the_task_also_for_a_client_that_comes_late(tuned):
    newer = jax.tree.map(lambda x: x + 1, tuned)
    begun = Start(tuned, jnp.int32(1))
    same(teacher(sent_in(STREAM[1], begun, newer)), tuned)
    # before the first round of a task is over, the server has the start of the task before
    stale = Start(tuned, jnp.int32(0))
    same(teacher(sent_in(STREAM[1], stale, newer)), newer)
    # a client that stays behind in the first task has the same teacher as the others
    behind = sent_in(STREAM[1], begun, newer)._replace(task=STREAM[0])
    same(teacher(behind), tuned)


def test_old_classes_are_distilled_from_it(tuned):
    start, task = LEARNER.trainable(tuned, TASKS[1]), TASKS[1]
    newer = jax.tree.map(lambda x: x + 0.1 * jnp.sign(x), start)
    batch = batch_of([1, 2, 4])
    context = sent_in(task, Start(start, jnp.int32(1)), newer)._replace(cached=tuned)
    logits = {}
    for name, params in (("newer", newer), ("start", start)):
        logits[name] = LEARNER.forward(FROZEN, tuned, params, batch, task, True)
    step = ClientStep(LEARNER, context, newer, logits["newer"], batch, KEY, newer)
    found = distil_task_start(3.0, 2.0).loss(step, ())
    of = lambda teacher: distillation(
        logits["newer"].logits, logits[teacher].logits, task.old, batch.mask, 2.0
    )
    assert float(found) == pytest.approx(3 * float(of("start")), rel=1e-5)
    assert float(found) != pytest.approx(3 * float(of("newer")), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["lwf", "icarl"])
def test_the_teacher_of_the_second_task_is_the_model_at_the_end_of_the_first(name):
    before, after = history(name)[1][0].params, history(name)[3][0].rules[0]
    pair = jax.tree.map(lambda x: x[0], before.adapter)
    same((after.trainable.adapter, after.trainable.classifier), (pair, before.classifier))
    assert int(after.task) == 1


# ---- iCaRL -------------------------------------------------------------------------------------------------


def empty(size):
    return Exemplars(jnp.zeros(size, jnp.int32), jnp.full(size, -1), jnp.full(size, -1.0))


def test_the_memory_is_the_same_sample_in_whatever_order_rows_come_and_however_often():
    key = jax.random.key_data(jax.random.key(5))
    offered = [np.arange(1, 9), np.arange(20, 28), np.arange(40, 48)]
    memories = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 1, 0, 2, 0)):
        memory = empty(5)
        for part in order:
            memory = keep_highest(memory, batch_of(offered[part]), key)
        memories.append(memory)
    kept = [sorted(memory.index.tolist()) for memory in memories]
    assert kept[0] == kept[1] == kept[2] and len(set(kept[0])) == 5
    assert set(kept[0]) <= set(np.concatenate(offered).tolist())
    for memory in memories:
        np.testing.assert_array_equal(memory.label, LABEL[np.asarray(memory.index)])


def test_every_row_is_equally_likely_to_be_kept():
    rows = batch_of(np.arange(1, 9))
    keep = jax.jit(jax.vmap(lambda key: keep_highest(empty(2), rows, jax.random.key_data(key)).index))
    kept = np.asarray(keep(jax.random.split(KEY, 4000))).ravel()
    np.testing.assert_allclose(np.bincount(kept, minlength=9)[1:] / 4000, 2 / 8, atol=0.03)


def test_padding_is_never_kept_and_an_empty_memory_gives_nothing_to_replay():
    padded = batch_of([3, 4])._replace(mask=jnp.array([True, False]), index=jnp.array([3, -1]))
    memory = keep_highest(empty(3), padded, jax.random.key_data(KEY))
    assert sorted(memory.index.tolist()) == [-1, -1, 3]
    assert draw_exemplars(empty(3), jnp.ones(5, bool), 4, KEY).tolist() == [-1] * 4


def test_only_old_classes_are_replayed():
    memory = keep_highest(empty(20), batch_of(np.arange(1, 21)), jax.random.key_data(KEY))
    old = jnp.array([False, True, False, True, False])
    places = np.asarray(draw_exemplars(memory, old, 64, KEY))
    assert places.shape == (64,) and places.min() >= 0
    assert set(LABEL[np.asarray(memory.index)[places]].tolist()) == {1, 3}


@pytest.mark.long
def test_a_batch_of_a_later_task_is_joined_by_the_images_of_as_many_rows_that_the_client_has_kept():
    """The memory holds row numbers, no images: the engine reads those. Through the engine, with a step that
    only looks at what it gets."""
    method, size = method_of("icarl", memory_size=6, batch_size=4, epochs=1, lora_blocks=2), 4
    server, (main, end) = method.init(KEY, FROZEN), method.rounds

    def step(context, local, batch, key):
        own, past = batch.mask[:size], batch.mask[size:]
        right = jnp.all(batch.input == DATA.input[batch.index], axis=(1, 2, 3)) & (
            batch.label == jnp.asarray(LABEL)[batch.index]
        )
        old = context.task.old[batch.label[size:]]
        return local, {
            "replayed": Weighted(jnp.sum(past).astype(jnp.float32), jnp.ones(())),
            "right": Weighted(jnp.sum(right & batch.mask).astype(jnp.float32), jnp.sum(batch.mask) * 1.0),
            "own_are_new": Weighted(
                jnp.sum(own & context.task.current[batch.label[:size]]) * 1.0, jnp.sum(own) * 1.0
            ),
            "past_are_old": Weighted(jnp.sum(past & old) * 1.0, jnp.sum(past) * 1.0),
        }

    (train,) = main.program.phases
    program = main.program._replace(phases=(train._replace(step=step, terms=()),))
    engine = engine_of(method._replace(rounds=(main._replace(program=program), end)), Lanes())
    states, play = federation("icarl").states, []
    for task, partition in zip(STREAM, PARTITIONS, strict=True):
        inputs = RoundInputs(FROZEN, DATA, partition, np.array([0, 2, 3]), task, 0, KEY)
        server, states, report = run_round(engine, server, jax.tree.map(jnp.copy, states), inputs)
        server, states, _ = run_round(engine, server, states, inputs._replace(when="task_end"))
        play.append(report.metrics)
    assert play[0]["replayed"] == 0 and play[1]["replayed"] == size
    assert [metrics["right"] for metrics in play] == [1, 1] == [m["own_are_new"] for m in play]
    assert play[1]["past_are_old"] == 1


@pytest.mark.long
def test_exemplars_are_a_clients_own():
    memory, _ = history("icarl")[3][1]  # and LwF's teacher
    rows = np.asarray(memory.exemplars.index)
    for client in (0, 2, 3):
        own = np.concatenate([partition.of_client(client) for partition in PARTITIONS])
        assert set(rows[client].tolist()) <= set(own.tolist())
        assert len(set(rows[client].tolist())) == 6
    assert rows[1].tolist() == [-1] * 6


@pytest.mark.long
def test_rows_of_a_task_take_no_places_until_it_is_over():
    """Six places, and old rows only, in every round of the second task."""
    first, second = (history("icarl")[place][1][0].exemplars for place in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, second, first)
    usable = np.asarray(TASKS[1].old)[np.asarray(second.label)] & (np.asarray(second.index) >= 0)
    assert usable[[0, 2, 3]].sum(1).tolist() == [6, 4, 6]  # client 2 has four rows of the first task
    before = history("icarl")[0][1][0].exemplars
    assert np.all(np.asarray(before.index) == -1)


# ---- class means -------------------------------------------------------------------------------------------


def means_of(rows, params=None):
    """Class means over these rows, by numpy."""
    found = plain_features(DATA.input[rows]) if params is None else output_of(params, rows).feature
    feature = np.asarray(found)
    return np.stack([feature[LABEL[rows] == label].mean(0) for label in range(SIZES.classes)])


@pytest.mark.long
def test_fedncm_asks_everybody_once_before_a_task_and_plays_no_other_round():
    rounds = federation("fedncm").method.rounds
    assert [(each.when, each.who, each.program.phases[0].view.epochs) for each in rounds] == [
        ("task_start", "everyone", 1)
    ]


def test_fedncm_s_means_are_those_of_all_rows_together_however_many_rounds_there_are():
    sums = history("fedncm")[3][0].params.classifier.sums
    held = np.concatenate([partition.indices for partition in PARTITIONS])
    np.testing.assert_array_equal(sums.examples, np.bincount(LABEL[held], minlength=5))
    np.testing.assert_allclose(sums.feature / np.asarray(sums.examples)[:, None], means_of(held), atol=1e-4)


@pytest.mark.long
def test_fedclm_s_means_are_of_the_model_at_the_end_of_their_task():
    first, last = (history("fedclm")[i][0].params for i in (1, 3))
    sums = last.classifier.sums
    np.testing.assert_array_equal(sums.feature[:3], first.classifier.sums.feature[:3])
    mean = np.asarray(sums.feature / jnp.maximum(sums.examples, 1)[:, None])
    held = np.concatenate([partition.indices for partition in PARTITIONS])
    model = lambda params: Params(params.adapter, params.classifier.inner)
    np.testing.assert_allclose(mean[:3], means_of(held, model(first))[:3], atol=1e-4)
    np.testing.assert_allclose(mean[3:], means_of(held, model(last))[3:], atol=1e-4)


@pytest.mark.long
def test_fedncm_after_tuning_has_the_means_of_the_tuned_model_as_weights():
    """The reading of FedNCM in PILoRA's tables that depends on who holds what: its logits are cosines up to
    the length of the feature."""
    fields = dict(epochs=2, batch_size=4, lr=1e-3, lora_lr=1e-3, lora_blocks=2)
    method = method_of("fedclm", classifier="linear", **fields)
    server = history("fedclm")[3][0]  # a client trains in the same way under both
    rows = batch_of([1, 2, 3])
    logits = jax.jit(method.predict)(round_context_of(TASKS[1]), server, rows)
    mean = means_of_sums(server.params.classifier.sums)
    feature = output_of(Params(server.params.adapter, server.params.classifier.inner), np.array([1, 2, 3]))
    expected = feature.feature @ (mean / np.linalg.norm(mean, axis=1, keepdims=True)).T
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    nearest = jax.jit(method_of("fedclm", **fields).predict)(round_context_of(TASKS[1]), server, rows)
    assert np.abs(nearest - logits).max() > 0.1


def means_of_sums(sums):
    return np.asarray(sums.feature) / np.asarray(sums.examples)[:, None]


def test_logits_of_class_means_by_hand():
    sums = Sums(jnp.array([[6.0, 8.0], [0.0, 2.0], [0.0, 0.0]]), jnp.array([2.0, 1.0, 0.0]))
    feature, seen = jnp.array([[1.0, 2.0]]), jnp.ones(3, bool)
    linear, nearest = (mean_logits(feature, sums, seen, kind) for kind in ("linear", "nearest"))
    np.testing.assert_allclose(linear[0, :2], [(1 * 3 + 2 * 4) / 5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(nearest[0, :2], [-8.0, -1.0], rtol=1e-6)
    assert linear[0, 2] == nearest[0, 2] == jnp.finfo(jnp.float32).min


# ---- whole runs --------------------------------------------------------------------------------------------

SHORT = [*COMMON, "--rounds", "1", "--clients", "2"]
LORA = ["--lora-lr", "1e-3"]


def summary_of(method, options, folder):
    """summary.json of a run."""
    arguments = ["run", method, *SHORT, *options, "--out", str(folder / "run")]
    assert cli.main(arguments) == 0
    return json.loads((folder / "run" / "summary.json").read_text())


LONG = ("pilora", "fedclm", "joint", "ewc", "lwf", "icarl")


@pytest.mark.parametrize("method", ["fedncm", *LONG])
@pytest.mark.long
def test_every_method_runs_from_the_command_line(method, tmp_path, capsys):
    own = [] if method == "fedncm" else LORA
    options = [*own, "--partition", "quantity", "--classes-per-client", "2"]
    summary = summary_of(method, options, tmp_path)
    assert summary["traces"] == 1
    assert len(summary["A"]) == (1 if method == "joint" else 5)
    extra = summary["communication_extra"]
    kinds = dict.fromkeys(("fedclm", "ewc", "icarl"), {"task_end"}) | {"fedncm": {"task_start"}}
    kinds |= {"pilora": {"handover"}}
    assert set(extra) == kinds.get(method, set())
    sends = method in ("fedclm", "fedncm")  # in other extra rounds something comes down alone
    assert all((sent["upload_scalars"] > 0) == sends for sent in extra.values())
    assert all(sent["download_scalars"] > 0 or method == "fedncm" for sent in extra.values())
    # FedNCM sends nothing in the rounds of a task
    assert (summary["communication"]["upload_scalars"] > 0) == (method != "fedncm")
    assert (summary["client_state"]["bytes"] > 0) == (method in ("ewc", "icarl"))
    capsys.readouterr()


@pytest.mark.long
@pytest.mark.parametrize(
    "variant",
    [
        [*LORA, "--headtune"],
        [*LORA, "--wo-reweight"],
        [*LORA, "--wo-orthogonality"],
        ["--adapter", "linear"],
        ["--adapter", "full"],
    ],
    ids=lambda variant: variant[-1].strip("-"),
)
def test_every_variant_of_pilora_runs_from_the_command_line(variant, tmp_path, capsys):
    options = ["--partition", "shards", "--classes-per-client", "30", *variant]
    summary = summary_of("pilora", options, tmp_path)
    assert summary["traces"] == 1
    before = {"task_start"} if "--headtune" in variant else set()
    assert set(summary["communication_extra"]) == before | {"handover"}
    capsys.readouterr()


@pytest.mark.long
def test_a_client_s_memory_is_counted():
    memory, _ = jax.tree.map(lambda x: x[0], federation("icarl").states)
    assert num_bytes(memory.exemplars) == 6 * 3 * 4  # label, row and priority; no image


def test_logits_are_the_head_s(tuned):
    output, head = output_of(tuned, np.arange(2)), tuned.classifier
    np.testing.assert_allclose(output.logits, output.feature @ head.kernel + head.bias, atol=1e-6)
