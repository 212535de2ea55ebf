"""The baselines of PILoRA's tables: their terms in closed form, and what a client remembers from one task to
the next."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs
from small_runs import COMMON
from test_conformance import DATA, DEALS, FROZEN, LABEL, SETTING, STREAM, TINY, federation, history

from fcljax import cli
from fcljax.federated.communication import num_bytes
from fcljax.methods.ewc import Anchor, consolidate
from fcljax.methods.fedncm import Sums, mean_logits
from fcljax.methods.finetune import (
    FinetuneConfig,
    Local,
    Recipe,
    Tuned,
    features,
    init_tuned,
    logits_of,
    train_step,
)
from fcljax.methods.icarl import Exemplars, draw, join, keep_highest
from fcljax.methods.lwf import Teacher, first_model_of_task
from fcljax.models.heads import distillation
from fcljax.models.vit import apply_vit, vit_backbone
from fcljax.types import Batch, Broadcast

KEY = jax.random.key(0)
RECIPE = Recipe(FinetuneConfig(), SETTING, vit_backbone(TINY), 1, 4, 1e-3)


@pytest.fixture(scope="module")
def tuned():
    return init_tuned(RECIPE, KEY)


def batch_of(rows):
    rows = np.asarray(rows)
    return Batch(DATA.image[rows], DATA.label[rows], jnp.ones(len(rows), bool), jnp.asarray(rows, jnp.int32))


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
    image = DATA.image[:3]
    np.testing.assert_allclose(
        features(RECIPE, FROZEN, tuned, image), apply_vit(TINY, FROZEN, image).cls, atol=1e-6
    )


def test_head_and_pair_have_rates_of_their_own(tuned):
    """Adam's first step has the size of the rate, wherever there is a gradient."""
    recipe = RECIPE._replace(config=FinetuneConfig(lora_lr=1e-2), lr=1e-4)
    start = Local(tuned, recipe.adam.init(tuned), ())
    after, _ = jax.jit(train_step(recipe))(FROZEN, None, start, batch_of([1, 2, 5]), STREAM[0], KEY)
    largest = lambda new, old: max(
        float(jnp.max(jnp.abs(a - b)))
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    )
    assert largest(after.tuned.lora, tuned.lora) == pytest.approx(1e-2, rel=1e-2)
    assert largest(after.tuned.head, tuned.head) == pytest.approx(1e-4, rel=1e-2)
    moved = np.abs(np.asarray(after.tuned.head.bias - tuned.head.bias)) > 0
    assert moved.tolist() == STREAM[0].current.tolist()  # classes of other tasks have no gradient


# ---- EWC ---------------------------------------------------------------------------------------------------


def test_the_anchor_is_merged_when_a_later_task_begins_and_only_then():
    one = lambda value: Tuned(jnp.full(2, value), jnp.full(1, value))
    state = Anchor(one(0.0), one(4.0), one(7.0), one(8.0), jnp.float32(0.25), jnp.int32(0))
    same_task = consolidate(None, state, STREAM[0], None, None).anchor
    assert (float(same_task.tuned.lora[0]), float(same_task.fisher.lora[0])) == (0, 4)
    later = consolidate(None, state, STREAM[1], None, None).anchor
    assert (float(later.tuned.lora[0]), float(later.fisher.lora[0])) == (7, 0.25 * 4 + 0.75 * 8)


def test_a_client_without_a_past_has_no_penalty_and_later_its_fisher_is_positive_and_limited():
    states = history("ewc")[1][1]  # after the first task
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(states.fisher))
    states = history("ewc")[3][1]
    for client in (0, 2, 3):
        leaves = [np.asarray(leaf[client]) for leaf in jax.tree.leaves(states.fisher)]
        assert max(leaf.max() for leaf in leaves) > 0 and min(leaf.min() for leaf in leaves) >= 0
        assert max(leaf.max() for leaf in leaves) <= 1e-4 * (1 + 1e-6)
    assert all(
        np.all(np.asarray(leaf[1]) == 0) for leaf in jax.tree.leaves(states.fisher)
    )  # client 1 has no rows


def test_anchors_of_different_clients_differ():
    anchor = history("ewc")[3][1].tuned.head.kernel
    assert np.abs(np.asarray(anchor[0] - anchor[2])).max() > 0


# ---- LwF ---------------------------------------------------------------------------------------------------


def test_a_teacher_is_taken_once_a_task(tuned):
    newer = jax.tree.map(lambda x: x + 1, tuned)
    first = first_model_of_task(Broadcast(tuned), Teacher(newer, jnp.int32(-1)), STREAM[0], None, None)
    again = first_model_of_task(Broadcast(newer), first, STREAM[0], None, None)
    later = first_model_of_task(Broadcast(newer), again, STREAM[1], None, None)
    for found, expected in ((first, tuned), (again, tuned), (later, newer)):
        jax.tree.map(np.testing.assert_array_equal, found.tuned, expected)
    assert (int(again.task), int(later.task)) == (0, 1)


def test_the_teacher_of_the_second_task_is_the_model_at_the_end_of_the_first():
    server, states = history("lwf")[1][0], history("lwf")[3][1]
    for client in (0, 2, 3):
        jax.tree.map(lambda x, y, i=client: np.testing.assert_array_equal(x[i], y), states.tuned, server)


# ---- iCaRL -------------------------------------------------------------------------------------------------


def empty(size):
    return Exemplars(
        jnp.zeros((size, 8, 8, 3), jnp.float16),
        jnp.zeros(size, jnp.int32),
        jnp.full(size, -1),
        jnp.full(size, -1.0),
    )


def test_the_memory_is_the_same_sample_in_whatever_order_rows_come_and_however_often():
    key = jax.random.key_data(jax.random.key(5))
    offered = [np.arange(1, 9), np.arange(20, 28), np.arange(40, 48)]
    memories = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 1, 0, 2, 0)):
        memory = empty(5)
        for part in order:
            memory = keep_highest(memory, batch_of(offered[part]), key)
        memories.append(memory)
    kept = [sorted(memory.row.tolist()) for memory in memories]
    assert (
        kept[0] == kept[1] == kept[2]
        and len(set(kept[0])) == 5
        and set(kept[0]) <= set(np.concatenate(offered).tolist())
    )
    for memory in memories:
        np.testing.assert_array_equal(memory.label, LABEL[np.asarray(memory.row)])
        np.testing.assert_allclose(memory.image, DATA.image[memory.row], atol=2e-3)


def test_every_row_is_equally_likely_to_be_kept():
    rows = batch_of(np.arange(1, 9))
    keep = jax.jit(jax.vmap(lambda key: keep_highest(empty(2), rows, jax.random.key_data(key)).row))
    kept = np.asarray(keep(jax.random.split(KEY, 4000))).ravel()
    np.testing.assert_allclose(np.bincount(kept, minlength=9)[1:] / 4000, 2 / 8, atol=0.03)


def test_padding_is_never_kept_and_an_empty_memory_gives_nothing_to_rehearse():
    padded = batch_of([3, 4])._replace(mask=jnp.array([True, False]), row=jnp.array([3, -1]))
    memory = keep_highest(empty(3), padded, jax.random.key_data(KEY))
    assert sorted(memory.row.tolist()) == [-1, -1, 3]
    nothing = draw(empty(3), jnp.ones(5, bool), 4, KEY)
    assert not np.any(nothing.mask) and not np.any(nothing.image)


def test_only_old_classes_are_rehearsed():
    memory = keep_highest(empty(20), batch_of(np.arange(1, 21)), jax.random.key_data(KEY))
    old = jnp.array([False, True, False, True, False])
    drawn = draw(memory, old, 64, KEY)
    assert set(drawn.label.tolist()) == {1, 3} and np.all(drawn.mask)
    np.testing.assert_array_equal(drawn.label, LABEL[np.asarray(drawn.row)])
    both = join(batch_of([7]), drawn)
    assert both.image.shape == (65, 8, 8, 3) and both.query is None


def test_exemplars_are_a_clients_own():
    rows = np.asarray(history("icarl")[3][1].exemplars.row)
    for client in (0, 2, 3):
        own = np.concatenate([np.split(deal.rows, deal.offset[1:-1])[client] for deal in DEALS])
        assert set(rows[client].tolist()) <= set(own.tolist())
        assert len(set(rows[client].tolist())) == 6
    assert rows[1].tolist() == [-1] * 6


# ---- class means -------------------------------------------------------------------------------------------


def means_of(rows, parameters=None):
    """Class means over these rows, by numpy."""
    image = DATA.image[rows]
    feature = (
        apply_vit(TINY, FROZEN, image).cls
        if parameters is None
        else features(RECIPE, FROZEN, parameters, image)
    )
    return np.stack([np.asarray(feature)[LABEL[rows] == label].mean(0) for label in range(SETTING.classes)])


def test_fedncm_s_means_are_those_of_all_rows_together_however_many_rounds_there_are():
    server = history("fedncm")[3][0]
    held = np.concatenate([deal.rows for deal in DEALS])
    np.testing.assert_array_equal(server.rows, np.bincount(LABEL[held], minlength=5))
    np.testing.assert_allclose(server.feature / np.asarray(server.rows)[:, None], means_of(held), atol=1e-4)


def test_fedclm_s_means_are_of_the_model_at_the_end_of_their_task():
    first, last = history("fedclm")[1][0], history("fedclm")[3][0]
    np.testing.assert_array_equal(last.sums.feature[:3], first.sums.feature[:3])
    mean = np.asarray(last.sums.feature / jnp.maximum(last.sums.rows, 1)[:, None])
    held = np.concatenate([deal.rows for deal in DEALS])
    np.testing.assert_allclose(mean[:3], means_of(held, first.tuned)[:3], atol=1e-4)
    np.testing.assert_allclose(mean[3:], means_of(held, last.tuned)[3:], atol=1e-4)


def test_logits_of_class_means_by_hand():
    sums = Sums(jnp.array([[6.0, 8.0], [0.0, 2.0], [0.0, 0.0]]), jnp.array([2.0, 1.0, 0.0]))
    feature, seen = jnp.array([[1.0, 2.0]]), jnp.ones(3, bool)
    linear, nearest = (mean_logits(feature, sums, seen, kind) for kind in ("linear", "nearest"))
    np.testing.assert_allclose(linear[0, :2], [(1 * 3 + 2 * 4) / 5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(nearest[0, :2], [-8.0, -1.0], rtol=1e-6)
    assert linear[0, 2] == nearest[0, 2] == jnp.finfo(jnp.float32).min


# ---- whole runs --------------------------------------------------------------------------------------------

SHORT = [*COMMON, "--rounds", "1", "--clients", "2", "--lora-lr", "1e-3"]


@pytest.mark.parametrize("method", ["pilora", "fedncm", "fedclm", "joint", "ewc", "lwf", "icarl"])
def test_every_method_runs_from_the_command_line(method, tmp_path, tmp_path_factory, capsys):
    options = [option for option in SHORT if method != "fedncm" or option not in ("--lora-lr", "1e-3")]
    with small_runs.compile_cache(tmp_path_factory):
        assert (
            cli.main(
                [
                    "run",
                    method,
                    *options,
                    "--partition",
                    "quantity",
                    "--alpha",
                    "2",
                    "--out",
                    str(tmp_path / "run"),
                ]
            )
            == 0
        )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["traces"] == 1
    assert len(summary["A"]) == (1 if method == "joint" else 5)
    assert set(summary["communication_extra"]) == ({"closing"} if method == "fedclm" else set())
    assert summary["communication"]["upload_scalars"] > 0
    assert (summary["client_state"]["bytes"] > 4) == (
        method in ("ewc", "lwf", "icarl")
    )  # FedNCM keeps one number
    capsys.readouterr()


@pytest.mark.parametrize(
    "variant",
    [["--headtune"], ["--wo-reweight"], ["--wo-orthogonality"], ["--tune", "none"], ["--tune", "all"]],
)
def test_every_variant_of_pilora_runs_from_the_command_line(variant, tmp_path, tmp_path_factory, capsys):
    with small_runs.compile_cache(tmp_path_factory):
        assert (
            cli.main(
                [
                    "run",
                    "pilora",
                    *SHORT,
                    "--partition",
                    "shards",
                    "--alpha",
                    "30",
                    *variant,
                    "--out",
                    str(tmp_path / "run"),
                ]
            )
            == 0
        )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["traces"] == 1
    assert set(summary["communication_extra"]) == ({"opening"} if variant == ["--headtune"] else set())
    capsys.readouterr()


def test_a_client_s_memory_is_counted():
    one = jax.tree.map(lambda x: x[0], federation("icarl").states)
    assert num_bytes(one.exemplars) == 6 * (8 * 8 * 3 * 2 + 3 * 4)


def test_logits_are_the_head_s(tuned):
    image = DATA.image[:2]
    expected = features(RECIPE, FROZEN, tuned, image) @ tuned.head.kernel + tuned.head.bias
    np.testing.assert_allclose(logits_of(RECIPE, FROZEN, tuned, image), expected, atol=1e-6)
