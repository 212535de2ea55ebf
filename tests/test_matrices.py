"""Factorisations of a batch of matrices end on a machine with two cores."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import ROOT

from fcljax import matrices
from fcljax.federated.claims import is_gram
from fcljax.parts.gram import inverse_of
from fcljax.parts.subspaces import extend_directions

X = jax.random.normal(jax.random.key(0), (2, 3, 6, 6))
GRAM = X @ X.mT


def of_batches(function):
    return jax.vmap(jax.vmap(function))


PROGRAMS = {
    "eigh": (of_batches(matrices.eigh), GRAM),
    "eigvalsh": (of_batches(matrices.eigvalsh), GRAM),
    "qr": (of_batches(matrices.qr), X),
    "svd": (of_batches(matrices.svd), X),
    "inverse": (inverse_of, GRAM),
    "claims of clients": (jax.vmap(is_gram), GRAM),
    "directions of blocks": (of_batches(lambda x: extend_directions(0 * x, x, jnp.float32(0.9))), X),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_on_cpus_no_batch_of_matrices_waits_for_other_threads(name):
    """A call of LAPACK gets one matrix, also in a loop over clients and blocks."""
    program, batch = PROGRAMS[name]
    text = jax.jit(program).lower(batch).as_text()
    calls = [line for line in text.splitlines() if "@lapack_" in line]
    shapes = [
        shape for line in calls for shape in re.findall(r"tensor<((?:\d+x)+)f32>", line.split(" : (")[1])
    ]
    assert shapes and all(shape.count("x") <= 2 for shape in shapes)


def test_a_batch_has_the_factors_of_its_matrices():
    values, vectors = of_batches(matrices.eigh)(GRAM)
    np.testing.assert_allclose(vectors * values[..., None, :] @ vectors.mT, GRAM, rtol=1e-4, atol=1e-4)
    q, r = of_batches(matrices.qr)(X)
    np.testing.assert_allclose(q @ r, X, atol=1e-5)
    u, s, vt = of_batches(matrices.svd)(X)
    np.testing.assert_allclose(u * s[..., None, :] @ vt, X, atol=1e-5)
    np.testing.assert_allclose(GRAM @ inverse_of(GRAM) @ GRAM, GRAM, rtol=1e-3, atol=1e-3)


def test_an_array_that_all_share_is_given_to_each():
    solve = matrices.one_by_one(jnp.linalg.solve)
    found = jax.vmap(solve, (0, None))(GRAM[0], X[0, 0])
    np.testing.assert_allclose(found, np.linalg.solve(GRAM[0], X[0, 0]), rtol=1e-2, atol=1e-2)


def test_nothing_else_factorises_matrices():
    """But ridge regression, which has gradients: its programs have one batch at a time."""
    factorises = r"linalg\.(cholesky|cho_|eig|svd|qr|pinv|inv|lu|solve|lstsq)"
    files = (ROOT / "fcljax").rglob("*.py")
    found = {path.name for path in files if re.search(factorises, path.read_text())}
    assert found == {"matrices.py", "ridge.py", "claims.py"}


@pytest.mark.long
def test_batches_that_do_not_depend_on_each_other_end():
    """Three at once on two cores, as in a server that merges three kinds of layers."""
    script = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import jax, jax.numpy as jnp
from fcljax import matrices
x = jax.random.normal(jax.random.key(0), (3, 16, 96, 96))
program = jax.jit(lambda batches: [jax.vmap(matrices.eigh)(batch @ batch.mT) for batch in batches])
for _ in range(30):
    jax.block_until_ready(program(list(x)))
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=120)
