"""RegMean: each merged layer solves its least squares problem over the clients' inputs (numpy, float64)."""

import functools

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

from fcljax.methods.regmean import GRAM_OF, RegMeanOptions, Responses, merge_layers, responses
from fcljax.models.heads import Head
from fcljax.models.vit import Lora, apply_vit, attention_inputs
from fcljax.parts.client import ClientEnd, Training
from fcljax.parts.federate import Payload, Run, linear_learner
from fcljax.parts.learner import Adapter, Params
from fcljax.parts.server import ServerRound
from fcljax.types import ClientContext, Upload

IMAGES = jnp.asarray(IMAGE[:9], jnp.float32)
D, RANK, CLASSES, CLIENTS, EXAMPLES = 6, 2, 3, 3, 40
RNG = np.random.default_rng(0)
F, X = RNG.normal(size=(2, CLIENTS, EXAMPLES, D)) * RNG.uniform(0.2, 3, size=(2, CLIENTS, 1, D))
SHAPES = {"a_q": (RANK, D), "b_q": (D, RANK), "a_v": (RANK, D), "b_v": (D, RANK)}
KERNEL = RNG.normal(size=(1 + CLIENTS, D, CLASSES))
FACTORS = {name: RNG.normal(size=(1 + CLIENTS, *shape)) for name, shape in SHAPES.items()}


def params_of(number):
    """Those that all clients received, or that a client trained."""
    one_block = {name: jnp.asarray(w[number], jnp.float32)[None] for name, w in FACTORS.items()}
    return Params(Lora(**one_block), Head(jnp.asarray(KERNEL[number], jnp.float32), jnp.zeros(CLASSES)))


RECEIVED, TRAINED = params_of(0), [params_of(1 + client) for client in range(CLIENTS)]
LORA = Adapter(lambda key, frozen: RECEIVED.adapter)
RUN = Run(SIZES, NETWORK._replace(width=D), LORA, Training(1, 4, 0.1))


def sent_by(client, alpha):
    context = ClientContext((), Payload(RECEIVED, {}), (), (), info_of(CLASSES))
    sums = {"features": F[client].T @ F[client], "inputs": (X[client].T @ X[client])[None]}
    sums = {name: jnp.asarray(gram, jnp.float32) for name, gram in sums.items()}
    return responses(RegMeanOptions(alpha), RUN).finalize(ClientEnd(context, TRAINED[client], {}), sums)


@functools.cache
def merged(alpha):
    """The server's parameters after it got what all clients sent."""
    total = jax.tree.map(lambda *leaves: sum(leaves), *(sent_by(client, alpha) for client in range(CLIENTS)))
    nothing = dict.fromkeys(ServerRound._fields)
    round_ = ServerRound(**nothing | {"task": STREAM[0], "reports": {"responses": total}})
    return merge_layers(RegMeanOptions(alpha), RUN, linear_learner(RUN)).update(round_, RECEIVED, ()).params


def layer(params, name):
    """Weights [inputs, outputs]."""
    weights = params.classifier.kernel if name == "classifier" else getattr(params.adapter, name)[0].T
    return np.asarray(weights, np.float64)


def inputs(client, name):
    """What a client's layer reads, one example in each row."""
    if name == "classifier":
        return F[client]
    if name in ("a_q", "a_v"):
        return X[client]
    return X[client] @ layer(TRAINED[client], name.replace("b", "a"))


@pytest.mark.parametrize("name", ["classifier", *SHAPES])
def test_a_layer_gives_the_clients_responses_in_least_squares(name):
    """argmin_W sum_i |X_i W - X_i W_i|^2 by numpy's solver, on the examples themselves."""
    x = [inputs(client, name) for client in range(CLIENTS)]
    clients = [layer(trained, name) for trained in TRAINED]
    targets = [x_i @ w for x_i, w in zip(x, clients, strict=True)]
    expected = np.linalg.lstsq(np.concatenate(x), np.concatenate(targets), rcond=None)[0]
    np.testing.assert_allclose(layer(merged(1.0), name), expected, rtol=1e-3, atol=1e-3)
    assert np.abs(expected - np.mean(clients, 0)).max() > 0.1  # the mean is another one


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("name", ["classifier", "a_v", "b_q"])
def test_what_is_off_the_diagonal_is_scaled_before_layers_are_merged(name, alpha):
    """(sum_i G_i)^-1 sum_i G_i W_i with G_i = alpha X_i^T X_i + (1 - alpha) diag(X_i^T X_i)."""
    squares = [inputs(client, name).T @ inputs(client, name) for client in range(CLIENTS)]
    scaled = [alpha * gram + (1 - alpha) * np.diag(np.diag(gram)) for gram in squares]
    weighted = [gram @ layer(trained, name) for gram, trained in zip(scaled, TRAINED, strict=True)]
    expected = np.linalg.solve(sum(scaled), sum(weighted))
    np.testing.assert_allclose(layer(merged(alpha), name), expected, rtol=1e-3, atol=1e-3)


# ---- in a run ----------------------------------------------------------------------------------------------

LORA_OPTIONS = dict(lora_blocks=2, lora_rank=3, lora_lr=0.01, lr=0.01, epochs=1, rounds=1)


def played(name, ids, **options):
    """The server after one round of the first task."""
    method = method_of(name, **LORA_OPTIONS, **options)
    server, states = begin(method)
    history = play(engine_of(method), server, states, PARTITIONS[:1], ids=ids, stream=STREAM[:1], rounds=1)
    return jax.tree.map(np.asarray, history[-1][0].params)


@pytest.mark.long
def test_a_single_client_is_merged_to_its_own_model_and_several_to_no_mean():
    """With one participant RegMean is FedAvg, which has the same clients."""
    average = functools.partial(played, "linear", adapter="lora", lora_pairs="one")
    alone, mean = played("regmean", [0]), average([0])
    for found, expected in zip(jax.tree.leaves(alone), jax.tree.leaves(mean), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-4)
    kernel = played("regmean", [0, 2]).classifier.kernel
    assert np.abs(kernel - average([0, 2]).classifier.kernel).max() > 1e-3


def test_a_client_sends_gram_matrices_and_each_layer_once():
    method = method_of("regmean", **LORA_OPTIONS)
    program = method.rounds[0].program
    server = compiled(method.init)(KEY, FROZEN)
    context = context_of(method, server, STREAM[0], info_of(SIZES.classes), FROZEN)
    state = method.init_client(KEY, server)

    def send(context, state):
        return program.finish(context, program.start(context, state, KEY), state)[0]

    upload = jax.eval_shape(send, context, state)
    width, classes = NETWORK.width, SIZES.classes
    sent = sum(leaf.size for leaf in jax.tree.leaves((upload.mean, upload.sum)))
    grams = width**2 + 2 * (width**2 + 2 * 3 * 3)
    assert sent == grams + 2 * 4 * 3 * width + width * classes + classes
    assert not jax.tree.leaves(upload.gather)


@pytest.mark.long
def test_sums_that_no_training_can_give_are_not_believed():
    method = method_of("regmean", **LORA_OPTIONS)
    server = compiled(method.init)(KEY, FROZEN)
    context = context_of(method, server, STREAM[0], info_of(SIZES.classes, 9), FROZEN)
    (claim,) = [claim for claim in method.rounds[0].program.claims if claim.name == "responses"]
    x = attention_inputs(FROZEN.network, apply_vit(TINY, FROZEN.network, IMAGES, full=True), 2)
    x = x.reshape(2, -1, TINY.width)
    pair = context.payload.trainable.adapter
    raw = jnp.einsum("mnd,mne->mde", x, x)
    f = apply_vit(TINY, FROZEN.network, IMAGES).cls
    grams = {"features": f.T @ f, "inputs": raw}
    grams |= {"b_q": pair.a_q @ raw @ pair.a_q.mT, "b_v": pair.a_v @ raw @ pair.a_v.mT}
    shapes = {"classifier": (TINY.width, SIZES.classes)} | {
        name: getattr(pair, name).mT.shape for name in SHAPES
    }
    steps = {
        name: 1e-3 * jnp.sin(jnp.arange(np.prod(shape))).reshape(shape) for name, shape in shapes.items()
    }
    changes = {name: grams[GRAM_OF[name]] @ step for name, step in steps.items()}
    honest = Responses(grams, changes)

    @jax.jit
    def holds(sent):
        return claim.holds(context, Upload(sum={"responses": sent}, gather={}))

    assert holds(honest)
    for name, gram in grams.items():
        for lie in (-gram, 1e3 * gram, gram.at[..., 0, 1].mul(1.5)):
            assert not holds(honest._replace(grams=grams | {name: lie})), name
    for name, change in changes.items():
        for lie in (1e5 * change, change.at[..., 0, 0].add(1e10)):
            assert not holds(honest._replace(changes=changes | {name: lie})), name
