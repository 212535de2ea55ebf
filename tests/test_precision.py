"""Accelerators round the factors of a float32 product to fewer bits unless they are told not to. Networks
allow that; statistics, prototypes, distances, prompts and classifiers do not."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import small_runs
from micro import FORMULA, KEY, SCALE, TASKS, TINY, compiled, context_of, info_of, main_of, method_of, rows_of

import fcljax
from fcljax.models.networks import make_network
from fcljax.models.shapes import CONVNETS
from fcljax.models.vit import vit_network

RESNET = CONVNETS["resnet_micro"]
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


@pytest.mark.parametrize("name", small_runs.some(["fppl", "hepco"], ["hepco"]))
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


def test_a_network_in_float32_is_exact():
    """Every product of a ViT and of a ResNet, forwards and backwards."""
    vit, resnet = vit_network(TINY), make_network(RESNET, *[(0.5, 0.5, 0.5)] * 2)
    for network, side in ((vit, TINY.image_size), (resnet, RESNET.image_size)):
        params = jax.eval_shape(network.init, KEY)

        def loss(params, image, network=network):
            return network.apply(params, image, None, True, jnp.ones(2, bool))[0].cls.sum()

        image = jax.ShapeDtypeStruct((2, side, side, 3), jnp.float32)
        text = jax.jit(jax.grad(loss)).lower(params, image).as_text()
        lines = [line for line in text.splitlines() if re.search("stablehlo.(dot_general|convolution)", line)]
        assert len(lines) > 10
        assert all(line.count("HIGHEST") == 2 for line in lines), [x for x in lines if "HIGHEST" not in x][0]
