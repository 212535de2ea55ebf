"""LoRM: the merged factor solves its least squares problem (numpy, float64), over clients and over tasks."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import (
    FROZEN,
    IMAGE,
    KEY,
    NETWORK,
    PARTITIONS,
    SIZES,
    STREAM,
    TINY,
    begin,
    compiled,
    context_of,
    engine_of,
    info_of,
    method_of,
    play,
)

from fcljax.adapters.lora import LoraOptions, lora
from fcljax.federated.claims import is_gram
from fcljax.methods.lorm import merge_factor, over_tasks
from fcljax.models.vit import apply_vit
from fcljax.parts.classifiers import linear
from fcljax.parts.client import ClientStep
from fcljax.parts.gram import (
    apply_gram,
    are_grams,
    divide_by_gram,
    inner_gram,
    least_squares,
    scale_off_diagonal,
)
from fcljax.parts.learner import learner
from fcljax.parts.reports import inputs_of_pairs
from fcljax.types import Batch

D, RANK, CLIENTS, TOKENS = 5, 2, 3, 40
RNG = np.random.default_rng(0)
X = RNG.normal(size=(CLIENTS, D, TOKENS)) * RNG.uniform(0.2, 3, size=(CLIENTS, D, 1))
GRAM = X @ X.transpose(0, 2, 1)
A, B = RNG.normal(size=(RANK, D)), RNG.normal(size=(D, RANK))
A_OF, B_OF = RNG.normal(size=(CLIENTS, RANK, D)), RNG.normal(size=(CLIENTS, D, RANK))


def as_jax(x):
    return jnp.asarray(x, jnp.float32)[None]  # one block


@functools.partial(jax.jit, static_argnums=1)
def merged(grams, trains_b):
    """What the server makes of what the clients send."""
    pairs = [as_jax(gram) for gram in grams]
    if trains_b:
        sent = [
            inner_gram(as_jax(A), g) @ (as_jax(b) - as_jax(B)).mT for g, b in zip(pairs, B_OF, strict=True)
        ]
    else:
        sent = [apply_gram(as_jax(a) - as_jax(A), g) for g, a in zip(pairs, A_OF, strict=True)]
    found = merge_factor(as_jax(A), as_jax(B), sum(sent), sum(pairs), jnp.bool_(trains_b))
    return [each[0] for each in found]


def test_b_gives_the_clients_responses_in_least_squares():
    """argmin_B sum_i ||B A X_i - B_i A X_i||^2, from numpy's solver on the examples themselves."""
    inputs = np.concatenate([A @ x for x in X], axis=1)
    outputs = np.concatenate([b @ A @ x for b, x in zip(B_OF, X, strict=True)], axis=1)
    expected = np.linalg.lstsq(inputs.T, outputs.T, rcond=None)[0].T
    a, b = merged(GRAM, True)
    np.testing.assert_allclose(b, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(a, A, rtol=1e-6)
    assert np.abs(b - B_OF.mean(0)).max() > 0.1  # an average of factors is another one


def test_a_gives_the_clients_responses_in_least_squares():
    """argmin_A sum_i ||B A X_i - B A_i X_i||^2, as one system in the entries of A."""
    system = np.concatenate([np.kron(x.T, B) for x in X])  # vec(B A X) = (X^T kron B) vec(A)
    target = np.concatenate([(B @ a @ x).T.reshape(-1) for a, x in zip(A_OF, X, strict=True)])
    expected = np.linalg.lstsq(system, target, rcond=None)[0].reshape(D, RANK).T
    a, b = merged(GRAM, False)
    np.testing.assert_allclose(a, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(b, B, rtol=1e-6)


def test_with_diagonals_a_is_a_weighted_mean_of_every_column():
    squares = np.stack([np.diag(gram) for gram in GRAM])
    a, _ = merged(squares, False)
    expected = np.einsum("krd,kd->rd", A_OF, squares) / squares.sum(0)
    np.testing.assert_allclose(a, expected, rtol=1e-4, atol=1e-5)
    _, b = merged(squares, True)
    full = sum(b_i @ A @ np.diag(g) @ A.T for b_i, g in zip(B_OF, squares, strict=True))
    np.testing.assert_allclose(
        b, full @ np.linalg.inv(A @ np.diag(squares.sum(0)) @ A.T), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("diagonal", [True, False])
def test_over_tasks_the_products_match_the_responses_of_every_task(diagonal):
    grams = np.stack([np.diag(np.diag(g)) for g in GRAM]) if diagonal else GRAM
    stored = [as_jax(np.diag(g) if diagonal else g) for g in grams]

    @jax.jit
    def joined(stored):
        weighted = jnp.stack([apply_gram(as_jax(a), g) for a, g in zip(A_OF, stored, strict=True)])
        return over_tasks(weighted, sum(stored))[:, 0]

    found = np.asarray(joined(stored))
    expected = sum(b @ a @ g for b, a, g in zip(B_OF, A_OF, grams, strict=True)) @ np.linalg.inv(grams.sum(0))
    np.testing.assert_allclose(
        sum(b @ a for b, a in zip(B_OF, found, strict=True)), expected, rtol=1e-3, atol=1e-4
    )


def test_what_nobody_has_an_input_for_stays_as_it_was_shared():
    gram = as_jax([0.0, 1.0, 4.0, 0.0, 2.0])
    moved = as_jax(np.ones((RANK, D))) * jnp.asarray([0.0, 1, 1, 0, 1])
    assert divide_by_gram(moved, gram)[0, 0].tolist() == [0.0, 1.0, 0.25, 0.0, 0.5]


def test_the_gram_matrix_of_features_is_shrunk_off_its_diagonal():
    feature = jnp.asarray([[1.0, 2.0], [3.0, -1.0]])
    np.testing.assert_allclose(scale_off_diagonal(feature.T @ feature, 0.5), [[10.0, -0.5], [-0.5, 5.0]])


# ---- the authors' code -------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["full", "diagonal"])
def test_merges_are_those_of_the_authors_code(part):
    """Of fed-mammoth, by golden/make_lorm.py; in float64, as theirs."""
    with np.load(Path(__file__).parent / "golden" / "lorm.npz") as file:
        made = {name: file[name].astype(np.float64) for name in file.files}
    with jax.enable_x64(True):
        given = {name: jnp.asarray(value)[..., None, :, :] for name, value in made.items()}
        a, b, grams = given["a"], given["b"], given["gram"]
        if part == "diagonal":
            grams = jnp.diagonal(grams, 0, 2, 3)
        total = sum(grams)
        moved = sum(apply_gram(a_i - a, g) for a_i, g in zip(given["a_of"], grams, strict=True))
        check(merge_factor(a, b, moved, total, jnp.bool_(False)), (made[f"{part}/a"], made["b"]))
        moved = sum(inner_gram(a, g) @ (b_i - b).mT for b_i, g in zip(given["b_of"], grams, strict=True))
        check(merge_factor(a, b, moved, total, jnp.bool_(True)), (made["a"], made[f"{part}/b"]))
        weighted = jnp.stack([apply_gram(a_t, g) for a_t, g in zip(given["a_of"], grams, strict=True)])
        check([sum(given["b_of"] @ over_tasks(weighted, total))], [made[f"{part}/tasks"]])
        squares, kernel = given["head_gram"], given["head"].mT
        moved = sum(g @ (w_i.mT - kernel) for w_i, g in zip(given["head_of"], squares, strict=True))
        check([least_squares(kernel, sum(squares), moved)], [made["kernel"].T])


def check(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one[0], other, rtol=0, atol=1e-6)


# ---- in a run ----------------------------------------------------------------------------------------------


def lorm(**options):
    return method_of("lorm", lora_blocks=2, lora_rank=3, lora_lr=0.01, lr=0.01, epochs=1, **options)


@pytest.fixture(scope="module")
def history():
    """The servers after each of three rounds of both tasks."""
    method = lorm(rounds=3)
    server, states = begin(method)
    engine = engine_of(method)
    first = jax.tree.map(jnp.copy, server.params)
    return first, [step[0].params for step in play(engine, server, states, PARTITIONS, rounds=3)]


@pytest.mark.long
def test_one_factor_trains_at_a_time_and_b_comes_first(history):
    first, (one, two, *_) = history
    np.testing.assert_array_equal(one.adapter.a_q, first.adapter.a_q)
    np.testing.assert_array_equal(one.adapter.a_v, first.adapter.a_v)
    assert np.abs(one.adapter.b_v[0]).max() > 0 and np.abs(one.adapter.b_v[1]).max() == 0
    np.testing.assert_array_equal(two.adapter.b_v, one.adapter.b_v)
    assert np.abs(np.asarray(two.adapter.a_v - one.adapter.a_v)[0]).max() > 1e-6


@pytest.mark.long
def test_at_the_end_of_a_first_task_the_pair_stays_and_later_ones_share_the_input(history):
    first, rounds = history
    np.testing.assert_allclose(rounds[2].adapter.a_v[1], first.adapter.a_v[1])  # of the task to come
    last, before = rounds[-1].adapter, rounds[2].adapter
    share = np.asarray(last.a_v[0] / before.a_v[0])  # of each input's squares: the same for every row of A
    assert np.all((share > 0) & (share < 1))
    np.testing.assert_allclose(share, np.broadcast_to(share[:, :1], share.shape), rtol=1e-4)


@pytest.mark.parametrize("gram", ["diagonal", "full"])
def test_a_client_sends_the_factor_once_and_d_numbers_for_each_block(gram):
    method = lorm(pair_gram=gram)
    program = method.rounds[0].program
    server = compiled(method.init)(KEY, FROZEN)
    context = context_of(method, server, STREAM[0], info_of(5), FROZEN)
    state = method.init_client(KEY, server)

    def send(context, state):
        return program.finish(context, program.start(context, state, KEY), state)[0]

    upload = jax.eval_shape(send, context, state)
    width, squares = NETWORK.width, NETWORK.width if gram == "diagonal" else NETWORK.width**2
    sent = sum(leaf.size for leaf in jax.tree.leaves((upload.mean, upload.sum)))
    pair, head = 2 * 2 * 3 * width, width * width + width * 5 + 5
    assert sent == pair + 2 * squares + head and not jax.tree.leaves(upload.gather)


def test_pairs_read_the_normalised_input_of_their_block_and_padding_counts_as_0():
    method = lorm()
    server = compiled(method.init)(KEY, FROZEN)
    context = context_of(method, server, STREAM[0], info_of(5), FROZEN)
    image = jnp.asarray(IMAGE[:3], jnp.float32)
    batch = Batch(image, jnp.zeros(3, jnp.int32), jnp.asarray([True, True, False]), jnp.arange(3))
    options = LoraOptions(lora_rank=3, lora_blocks=2, local_lora="current", global_lora="products")
    model = learner(NETWORK, lora(options, SIZES, NETWORK), linear(NETWORK.width, 5))

    def inputs(context, batch):
        trainable = context.payload.trainable
        return inputs_of_pairs(ClientStep(model, context, trainable, None, batch, KEY, trainable), 2)

    found = jax.jit(inputs)(context, batch)
    params = FROZEN.network
    taps = jax.jit(lambda params: apply_vit(TINY, params, image).taps)(params)  # B is 0 in a first task
    for block, name in enumerate(("embed", "block_00")):
        x = np.asarray(taps[name], np.float64)
        centred = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        norm = params[f"block_{block:02d}"]["norm1"]
        expected = centred * np.asarray(norm["scale"]) + np.asarray(norm["bias"])
        expected[2] = 0
        np.testing.assert_allclose(found[block], expected.reshape(-1, NETWORK.width), atol=1e-4)


def test_products_that_no_examples_can_have_are_not_believed():
    """|sum of x y|^2 <= sum of x^2 times sum of y^2, entry by entry."""
    head = np.float32(GRAM[0])
    pairs = jnp.ones((1, D))

    def possible(head, pairs=pairs):
        return bool(is_gram(jnp.asarray(head)) & are_grams(pairs))

    assert possible(head) and not possible(head, -pairs)
    assert possible(head, pairs.at[0, 1].set(0.0))  # of an input that is 0 for every example
    false = head.copy()
    false[1, 3] = 1.1 * np.sqrt(head[1, 1] * head[3, 3])
    assert not possible(false) and not possible(-head)
