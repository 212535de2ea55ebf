"""FedTPG: the generator computes the paper's equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import FROZEN, KEY, NETWORK
from scipy.special import erf

from fcljax import cli
from fcljax.methods.fedtpg import FedTPGOptions, generate, new_generator

TEXTS = FROZEN.text


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
