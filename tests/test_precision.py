"""Accelerators round the factors of a float32 product to fewer bits unless they are told not to. Networks
allow that; statistics, prototypes, distances, prompts and classifiers do not."""

import ast
from pathlib import Path

import jax
import pytest
from micro import FORMULA, KEY, SCALE, TASKS, compiled, context_of, info_of, main_of, method_of, rows_of

import fcljax

ROOT = Path(fcljax.__file__).parent
ROOMS = ["parts", "methods", "adapters", "federated", "models/heads.py", "models/prototypes.py"]
NETWORKS = {"lenet.py", "generator.py"}  # of GLFC's gradients and of the servers' images and latents
PRODUCTS = {"einsum", "matmul", "dot", "tensordot", "inner", "dot_general"}


def rounded_products(source: str) -> list[int]:
    """The lines of a file with a product that the platform may round."""
    found = []
    for node in ast.walk(ast.parse(source)):
        called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        exact = isinstance(node, ast.Call) and any(each.arg == "precision" for each in node.keywords)
        operator = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
        if operator or (called in PRODUCTS and not exact):
            found.append(node.lineno)
    return found


def test_products_outside_networks_are_exact():
    paths = [
        path for room in ROOMS for path in ([ROOT / room] if room[-1] == "y" else (ROOT / room).rglob("*.py"))
    ]
    assert len(paths) > 50
    found = {path.name: rounded_products(path.read_text()) for path in paths if path.name not in NETWORKS}
    assert not {name: lines for name, lines in found.items() if lines}
    assert rounded_products("a @ b\njnp.einsum('ij->i', a)\njnp.dot(a, b, precision=p)") == [1, 2]


@pytest.mark.parametrize("name", ["fppl", "hepco"])
def test_a_training_step_and_its_gradient_are_exact(name):
    """On a network without products; with prompts that are sums and a gate of cosines."""
    values = {"fppl": dict(prompt_length=2, prompt_blocks=2), "hepco": dict(pool_length=2, pool_blocks=2)}
    method = method_of(name, network=FORMULA, **values[name])
    server = compiled(method.init)(KEY, SCALE)
    context = context_of(method, server, TASKS[1], info_of(5, 3), SCALE)
    program = main_of(method).program
    local = program.start(context, method.init_client(KEY, server), KEY)
    trace = str(jax.make_jaxpr(program.phases[0].step)(context, local, rows_of([3, 4, 4]), KEY))
    exact = trace.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
    assert trace.count("dot_general[") == exact > 2
