"""PromptFL and FedTPG: what trains, what the generator computes, and which classes it reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import (
    DATA,
    FROZEN,
    KEY,
    NETWORK,
    PARTITIONS,
    STREAM,
    begin,
    compiled,
    engine_of,
    method_of,
    play,
    round_context_of,
)
from scipy.special import erf, logsumexp

import fcljax
from fcljax import cli
from fcljax.methods.fedtpg import FedTPGOptions, generate, new_generator
from fcljax.types import Batch

OPTIONS = {
    "promptfl": {"context_length": 3, "lr": 1e-4},
    "fedtpg": {"context_length": 3, "generator_heads": 2, "generator_layers": 1, "lr": 1e-4},
}
TEXTS = FROZEN.text


def images():
    nothing = jnp.zeros(60, jnp.int32)
    return Batch(DATA.input, nothing, nothing == 0, nothing)


# ---- the generator, in numpy from the paper ----------------------------------------------------------------


def layer_norm(x, norm):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * norm.scale + norm.bias


def attention(params, x, source, heads):
    q, k, v = (
        y @ layer.kernel + layer.bias
        for layer, y in ((params.query, x), (params.key, source), (params.value, source))
    )
    size = q.shape[1] // heads
    read = np.zeros_like(q)
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        for m in range(len(q)):
            score = np.array([q[m, part] @ k[n, part] for n in range(len(k))]) / np.sqrt(size)
            weight = np.exp(score) / np.exp(score).sum()
            read[m, part] = sum(weight[n] * v[n, part] for n in range(len(k)))
    return read @ params.out.kernel + params.out.bias


def mlp(params, x):
    hidden = layer_norm(x, params.norm) @ params.first.kernel + params.first.bias
    linear, gate = np.split(hidden, 2, axis=1)
    hidden = linear * gate * 0.5 * (1 + erf(gate / np.sqrt(2)))
    return hidden @ params.second.kernel + params.second.bias


@pytest.mark.long
@pytest.mark.parametrize("layers", [0, 2])
def test_the_generator_computes_the_papers_equations(layers):
    options = FedTPGOptions(context_length=3, generator_heads=2, generator_layers=layers)
    generator = new_generator(options, NETWORK.text)(KEY, TEXTS)
    # values unlike the first ones, where norms and biases do nothing
    rng = np.random.default_rng(0)
    generator = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), generator)
    competing = np.array([True, False, True, True, False])
    found = generate(generator, TEXTS.rows, jnp.asarray(competing), 2)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), generator)
    texts = np.asarray(TEXTS.rows, np.float64)[competing]
    cross = params.cross.attention
    x = attention(cross, layer_norm(params.queries, cross.norm), layer_norm(texts, cross.norm_texts), 2)
    x = x + mlp(params.cross.mlp, x)
    for layer in params.layers:
        normed = layer_norm(x, layer.attention.norm)
        x = x + attention(layer.attention, normed, normed, 2)
        x = x + mlp(layer.mlp, x)
    np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-4)


def test_heads_that_do_not_divide_the_width_are_refused(capsys):
    assert cli.main(["run", "fedtpg", "--generator-heads", "5"]) == 2
    assert "5 does not divide the width 64 of the text tower's tokens; nearest: 4" in capsys.readouterr().err


# ---- both methods ------------------------------------------------------------------------------------------


def logits(name, params, task):
    """From the definition: cosines of image features and of prompts behind the vectors, times s."""
    vectors = params
    if name == "fedtpg":
        vectors = generate(params, TEXTS.rows, jnp.asarray(task.seen), 2)
    text = NETWORK.text.features(TEXTS, vectors)
    image = NETWORK.apply(FROZEN.network, DATA.input, None, False)[0].cls @ TEXTS.image_projection
    norm = lambda x: np.linalg.norm(x, axis=-1)
    return TEXTS.scale * (image @ text.T) / norm(image)[:, None] / norm(text)


@pytest.fixture(scope="module", params=OPTIONS)
def played(request):
    method = method_of(request.param, epochs=2, batch_size=4, **OPTIONS[request.param])
    server, states = begin(method)
    return request.param, method, [server, *(s for s, *_ in play(engine_of(method), server, states))]


@pytest.mark.long
def test_logits_are_cosines_of_images_and_prompts_and_classes_not_seen_never_win(played):
    name, method, history = played
    for server, task in ((history[1], STREAM[0]), (history[-1], STREAM[1])):
        found = compiled(method.predict)(round_context_of(task), server, images())
        seen = np.asarray(task.seen)
        expected = logits(name, server.params.classifier, task)
        np.testing.assert_allclose(np.asarray(found)[:, seen], expected[:, seen], rtol=1e-4, atol=1e-4)
        assert np.all(np.asarray(found)[:, ~seen] < -1e38)


@pytest.mark.long
def test_training_lowers_the_loss_on_the_task(played):
    """The loss of the first task's clients, before and after its rounds."""
    name, _, history = played
    rows = np.asarray(PARTITIONS[0].indices)
    label = np.asarray(DATA.label)[rows]

    def loss(server):
        x = np.asarray(logits(name, server.params.classifier, STREAM[0]))[rows]
        x = x[:, np.asarray(STREAM[0].current)]
        return np.mean(logsumexp(x, axis=1) - x[np.arange(len(x)), label])

    assert loss(history[2]) < loss(history[0])
    assert not history[-1].params.adapter


def test_the_generator_reads_the_classes_that_compete_and_no_others():
    method = method_of("fedtpg", **OPTIONS["fedtpg"])
    server, _ = begin(method)

    def found(features):
        frozen = FROZEN._replace(text=TEXTS._replace(features=features))
        # a task of classes 0, 1, 2
        return compiled(method.predict)(round_context_of(STREAM[0], frozen=frozen), server, images())

    before = found(TEXTS.features)
    np.testing.assert_array_equal(found(TEXTS.features.at[3:].multiply(-1.0)), before)
    after = found(TEXTS.features.at[1].multiply(-1.0))
    assert np.abs(np.asarray(after - before)[:, :3]).max() > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_learns_digits_by_their_names(name):
    result = fcljax.run(name, "digits", tasks=2, clients=3, progress=False)
    zero = fcljax.run("zero-shot", "digits", tasks=2, clients=3, progress=False)
    assert result.metrics["A_last"] > zero.metrics["A_last"]
    assert len(result.metrics["base_and_new"]["new"]) == 1
