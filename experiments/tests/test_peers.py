"""What experiments/bench_peers.py compares is the same work: plain loops give the engine's numbers."""

import dataclasses
import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs
from jax.experimental import pallas

sys.path.append(str(small_runs.ROOT / "experiments"))

import bench_gpu
import bench_peers
from peers import accelerator, contest, dense, game, kernels, outside, prompted, texts

from fcljax.federated.client_loop import Lanes
from fcljax.models.shapes import AttentionKernel
from fcljax.models.vit import ViTConfig, apply_vit, parameter_shapes

pytestmark = pytest.mark.long  # the benches beside which we are measured: nothing of the package needs them

MLP = dense.Dense((6,), (), (5,), 3, (7, 2, 4), batch=3, epochs=2, rate=0.3)
CNN = dense.Dense((4, 4, 1), (2, 3), (5,), 3, (4, 3), batch=3, rate=0.3)
VALID = dense.Dense((6, 6, 1), (), (5,), 3, (4, 3), batch=3, rate=0.3, valid=(2, 3))
MICRO = ViTConfig(image_size=16, patch=8, width=16, depth=2, heads=2, mlp=32)


def in_order(client, epoch, rows):
    return np.arange(rows)


def unshuffled(federation):
    """The same federation, whose clients read their rows in order."""
    (each,) = federation.method.rounds
    (phase,) = each.program.phases
    program = each.program._replace(phases=(phase._replace(view=phase.view._replace(shuffle=False)),))
    return federation._replace(method=federation.method._replace(rounds=(each._replace(program=program),)))


@functools.cache
def by_engine(work):
    """The weights after a round, by name."""
    federation = dense.game_of(work)
    server = game.round_of(unshuffled(federation), Lanes(2, "vmap"))()
    return dense.weights_of(federation._replace(server=server))


def assert_same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(np.asarray(found[name]), np.asarray(value), err_msg=name, **tolerance)


def test_plain_loops_in_jax_give_the_engines_model():
    federation = dense.game_of(MLP)
    expected = by_engine(MLP)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), expected, dense.weights_of(federation))
    assert min(moved.values()) > 1e-3  # a round that changes nothing would agree with anything
    for loop in (dense.jax_steps, dense.jax_clients):
        assert_same(loop(MLP, federation, in_order)(), expected, atol=1e-5)


def test_a_plain_loop_gives_the_engines_model_of_convolutions_without_padding():
    expected = by_engine(VALID)
    federation = dense.game_of(VALID)
    assert expected["dense0"].shape == (1 * 1 * 3, 5)  # 6 pixels: 4, 2, and 1 after the pooling
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), expected, dense.weights_of(federation))
    assert min(moved.values()) > 1e-3
    assert_same(dense.jax_steps(VALID, federation, in_order)(), expected, atol=1e-5)


def test_pfl_researchs_benchmark_is_measured_by_lanes():
    """A small one, with the times that its 1,500 rounds and 150 evaluations would take."""
    for line in accelerator.pfl_cifar10(accelerator.SMALL):
        assert line["whole_s"] > 1500 * line["round_s"]
        assert "1,500 rounds in" in bench_gpu.markdown([line])


@pytest.mark.parametrize("work", [MLP, CNN, VALID], ids=["mlp", "cnn", "valid"])
def test_the_loop_in_torch_gives_the_engines_model(work):
    pytest.importorskip("torch")
    federation = dense.game_of(work)
    assert_same(dense.torch_steps(work, federation, in_order)(), by_engine(work), atol=1e-5)


@functools.cache
def one_batch(method):
    """A batch without augmentation, and a federation whose step is gradient descent at a rate so large that
    the gradient can be read from it."""
    work = prompted.Work(
        method, MICRO, (6, 3), 6, test=8, augment=False, optimiser="sgd", rate=1000.0, blocks=2
    )
    federation = prompted.game_of(work)
    rows = jnp.asarray(game.rows_of(federation.partition, 0))
    image, label, _ = federation.fetch(federation.data, rows, jax.random.split(game.KEY, 6), True)
    loss, before, after = prompted.clients_step(federation, image, label)
    gradient = jax.tree.map(lambda a, b: (a - b) / work.rate, before, after)
    return work, federation, image, label, loss, gradient


@pytest.mark.parametrize("how", ["released", "frozen", "lean", "compiled"])
def test_fppl_in_torch_has_our_loss_and_gradients(how):
    torch = pytest.importorskip("torch")
    from peers import torch_vit

    work, federation, image, label, loss, gradient = one_batch("fppl")
    net = torch_vit.Fppl(work, federation, how)
    prototype = torch_vit.tensor(federation.server.rules[0].vector).mean(0)[prompted.TASK_CLASSES :]
    theirs = torch_vit.fppl_loss(net, torch_vit.tensor(image), torch_vit.tensor(label).long(), prototype)
    theirs.backward()
    assert theirs.item() == pytest.approx(loss, rel=1e-4)
    found = {
        "prompt": net.prompt.grad[1],
        "psi": net.psi.grad,
        "sigma": net.sigma.grad,
        "kernel": net.fc.weight.grad.T,
    }
    gate = gradient.adapter.gate
    expected = {
        "prompt": gradient.adapter.prompt,
        "psi": gate.psi,
        "sigma": gate.sigma,
        "kernel": gradient.classifier.kernel,
    }
    assert_same(found, expected, atol=1e-4 * float(jnp.abs(gradient.adapter.prompt).max()), rtol=1e-4)
    assert not torch.any(net.prompt.grad[0])
    assert (net.vit.patch.weight.grad is not None) == (how == "released")


@pytest.mark.parametrize("how", ["released", "lean", "compiled"])
def test_pilora_in_torch_has_our_loss_and_gradients(how):
    pytest.importorskip("torch")
    from peers import torch_vit

    work, federation, image, label, loss, gradient = one_batch("pilora")
    net = torch_vit.Pilora(work, federation, how)
    theirs, _ = torch_vit.pilora_loss(net, torch_vit.tensor(image), torch_vit.tensor(label).long())
    theirs.backward()
    assert theirs.item() == pytest.approx(loss, rel=1e-4)
    found = {name: x.grad for name, x in zip(gradient.adapter._fields, net.pairs[1], strict=True)}
    assert_same(found, {n: x[0] for n, x in gradient.adapter._asdict().items()}, atol=1e-5, rtol=1e-4)
    centres = np.stack([x.grad for x in net.centres[prompted.TASK_CLASSES :]])
    np.testing.assert_allclose(centres, gradient.classifier, atol=1e-6, rtol=1e-3)


def test_a_later_evaluation_of_fppl_reads_what_the_first_one_computed(monkeypatch):
    work, federation, *_ = one_batch("fppl")
    kept = prompted.queries(work, federation, prompted.test_split(work))

    def confidence(later, query=kept):
        monkeypatch.setattr(prompted, "queries", lambda *_: query)
        return prompted.predict_of(work, federation, later)().confidence

    first = confidence(later=False)
    np.testing.assert_allclose(confidence(later=True), first, rtol=1e-5)
    assert np.isnan(confidence(later=True, query=kept * np.nan)).all()


@pytest.mark.parametrize("method", ["fppl", "pilora"])
def test_the_plain_loss_in_jax_has_our_loss_and_gradients(method):
    work, federation, image, label, loss, gradient = one_batch(method)
    part, fixed = prompted.start_of(work, federation)
    of = lambda part: prompted.LOSSES[method](
        work, part, federation.frozen.network, fixed, image, label, jnp.ones(len(label))
    )
    (plain, _), found = jax.jit(jax.value_and_grad(of, has_aux=True))(part)
    assert float(plain) == pytest.approx(loss, rel=1e-4)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(gradient._replace(stats=())), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-3)


def test_the_plain_loop_on_texts_takes_the_engines_steps():
    """One epoch of one batch for each client: their order of rows does not matter."""
    work = bench_peers.text_work("text", small=True)._replace(batch=6, optimiser="sgd", rate=10.0)
    federation = texts.game_of(work)
    server = game.round_of(federation, Lanes(2, "vmap"))()
    expected = texts.start_of(federation._replace(server=server))
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), expected, texts.start_of(federation))
    assert min(jax.tree.leaves(moved.pairs)) > 1e-3
    found = texts.jax_steps(work, federation)()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)


def test_flops_of_the_formula_are_those_of_the_compiled_network():
    vit = dataclasses.replace(MICRO, width=64, mlp=256, heads=4, image_size=32)
    frozen, image = parameter_shapes(vit), jnp.zeros((2, 32, 32, 3))
    lowered = jax.jit(lambda frozen, image: apply_vit(vit, frozen, image).cls).lower(frozen, image)
    cost = lowered.cost_analysis()
    assert cost is not None
    # XLA counts sums, norms and activations too
    assert 0.85 < 2 * prompted.forward_flops(vit, 0, 0) / cost["flops"] < 1


LINE = '%{name} = f32[2,3]{{1,0}} fusion(%a), metadata={{op_name="jit(traced)/cond/branch_1_fun/{path}"}}'


@pytest.mark.parametrize(
    "name, path, found",
    [
        ("ynn_fusion.7", "ViT/Block_3/fc1/abk,km->abm/dot_general", ("library", "Block/fc1/dot_general")),
        (
            "mul_fusion",
            "jit(_descent)/transpose(jvp(ViT))/Block_11/attn/mul",
            ("XLA", "Block/attn/mul, gradient"),
        ),
        ("dot.2", "jvp()/dot_general", ("library", "dot_general")),
    ],
)
def test_kernels_of_a_profile_are_named_by_their_place_in_the_network(name, path, found):
    assert kernels.purpose(name, LINE.format(name=name, path=path)) == found


def test_a_kernels_purpose_is_looked_up_in_the_program_that_has_all_kernels_of_its_run():
    def lines(path):
        return {"add.1": LINE.format(name="add.1", path=path)}

    both = {"jit_traced": [lines("first/add"), lines("second/add") | {"mul.1": ""}]}
    events = [
        kernels.Event("jit_traced", "0", "add.1", 1.0),
        kernels.Event("jit_traced", "1", "add.1", 2.0),
        kernels.Event("jit_traced", "1", "mul.1", 4.0),
    ]
    spent, times = kernels.by_purpose(events, both)
    assert spent == {("XLA", "first/add"): 1.0, ("XLA", "second/add"): 2.0, ("XLA", "mul"): 4.0}
    assert set(times.values()) == {1}


# ---- the benches themselves --------------------------------------------------------------------------------


@pytest.mark.long
def test_the_table_has_a_row_for_every_way(capsys):
    text = bench_peers.report(bench_peers.parse(["--small", "--repeats", "1", "--only", "tiny"]))
    ways = ["fcljax", "fcljax, 8 lanes side by side", "JAX, a call per step", "JAX, a call per client"]
    ways += ["torch"] * contest.has_torch()
    rows = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| 5,000")]
    assert rows == ways
    assert "Flower: " in text and "GFLOP/s: numpy" in text


def test_a_profile_says_what_the_time_of_a_round_is_for():
    command = [sys.executable, "experiments/bench_peers.py", "--small", "--profile", "--only", "cnn"]
    done = subprocess.run(command, cwd=small_runs.ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    *parts, (_, _, whole, _, _) = rows
    times, whole = {row[1]: float(row[2]) for row in parts}, float(whole)
    assert {"conv_general_dilated", "conv_general_dilated, gradient"} < times.keys()
    assert 0.5 * whole < sum(times.values()) <= whole + 0.05 * len(times)


WAY = """
import sys

sys.path.insert(0, {peers!r})
print("what a library says while it is imported")
import jax
import numpy as np
from networks import mean_loss
from served import serve


def way(work):
    def play():
        print("or in a round")
        total = 0
        for image, label in work.clients:
            slope = jax.grad(mean_loss)(work.weights, image, label, np.ones(len(label), np.float32))
            after = jax.tree.map(lambda w, g: w - work.rate * g, work.weights, slope)
            share = {share}
            total = jax.tree.map(lambda x: share * x, after) if total == 0 else jax.tree.map(
                lambda a, b: a + share * b, total, after
            )
        return total

    return play


serve(way)
"""
MINE, ALIKE = "len(label) / sum(len(y) for _, y in work.clients)", "1 / len(work.clients)"


@pytest.mark.parametrize(("share", "same"), [(MINE, True), (ALIKE, False)])
def test_a_library_in_a_process_of_its_own_must_do_the_same_work(share, same, tmp_path, monkeypatch):
    program = tmp_path / "way.py"
    peers = str(small_runs.ROOT / "experiments" / "peers")
    program.write_text(WAY.format(peers=peers, share=share))
    monkeypatch.setitem(outside.LIBRARIES, "other", outside.Library((), str(program)))
    monkeypatch.setattr(outside, "python_of", lambda folder, name: Path(sys.executable))
    if same:
        outside.same_work(tmp_path, "other")
    else:
        with pytest.raises(RuntimeError, match="other does other work than a plain loop"):
            outside.same_work(tmp_path, "other")


def test_shares_and_ratios_are_those_of_the_median_cpu_seconds_whatever_the_clock_says():
    work = contest.Workload("w", 100, 6 * 10**9, ())
    rows = [
        contest.Row(work, "fcljax", (1.0, 2.0, 4.0), (1.5, 0.5, 2.5), 3.0),
        contest.Row(work, "other", (8.0, 8.0), (3.0, 3.0), 0.0),
    ]
    first, second = contest.table(rows, peak=10.0).splitlines()[2:]
    assert first == "| w | fcljax | 67 | 40 to 200 | 1.00 | 2.00 | 3.0 | 40 % |"
    assert second == "| w | other | 33 | 33 to 33 | 0.50 | 8.00 | 0.0 | 20 % |"


@pytest.mark.long
def test_lanes_on_an_accelerator_are_measured_and_a_default_is_chosen():
    found = [*accelerator.ceilings(accelerator.SMALL)]
    found += accelerator.training(accelerator.SMALL._replace(lanes=(2,)), "bfloat16", "vmap")
    text = bench_gpu.markdown(found)
    assert "| bfloat16 | vmap | 2 |" in text and "unknown |" in text
    assert "Default for bfloat16: 2 lanes, vmap" in text


def test_attention_is_measured_beside_the_kernel_of_the_chip(monkeypatch):
    """As on a TPU, interpreted: both give the same numbers. cuDNN has a row that says why it did not run."""
    monkeypatch.setattr(accelerator, "kernel_on", lambda machine: AttentionKernel("tpu"))
    monkeypatch.setattr(accelerator, "LAYERS", 2)
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))
    large = accelerator.SMALL._replace(vit=dataclasses.replace(accelerator.MICRO, image_size=32))
    ours, kernel, cudnn = accelerator.attentions(large)
    assert ours["attention"] == "in XLA" and ours["apart"] == 0
    assert kernel["attention"] == "one kernel" and 0 <= kernel["apart"] < 2**-6
    assert cudnn["attention"] == "cuDNN" and cudnn["failed"]
    text = bench_gpu.markdown([ours, kernel | {"apart": 0.001}, cudnn])
    assert "| attention, in XLA, forwards alone " in text
    assert "| attention, one kernel, 1.0e-03 from XLA's, forwards alone " in text
    assert f"| attention, cuDNN | {cudnn['failed']} |" in text


def sizes(lanes, **more):
    return {"training": "float32", "mode": "vmap", "lanes": lanes, **more}


def test_the_default_is_the_fewest_lanes_close_to_the_best():
    rates = {1: 50.0, 4: 98.0, 8: 100.0, 16: 99.0}
    found = [sizes(lanes, images_s=rate, compilation_s=1.0, peak_gib=None) for lanes, rate in rates.items()]
    (line,) = bench_gpu.defaults([*found, sizes(32, failed="out of memory")])
    assert line.startswith("Default for float32: 4 lanes, vmap")


def test_what_needs_too_much_memory_is_a_row():
    def measure():
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")

    line = sizes(32) | accelerator.tried(measure)
    assert "| float32 | vmap | 32 | out of memory |" in bench_gpu.markdown([line])


def test_what_a_broken_series_had_found_is_kept(tmp_path, monkeypatch):
    begins = {"begins": sizes(2), "then": [sizes(4)]}
    script = tmp_path / "series.py"
    said = [f"print({json.dumps(json.dumps(line))})" for line in (sizes(1), begins)]
    script.write_text("\n".join([*said, "raise SystemExit('boom')"]))
    monkeypatch.setattr(bench_gpu, "HERE", script)
    first, _, *failed = bench_gpu.in_a_process("float32 vmap", True, time.monotonic() + 600, 600)
    assert first == sizes(1)
    assert [line["lanes"] for line in failed] == [2, 4] and failed[0]["failed"] == "boom"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # read by torch.compile
def test_the_authors_loop_runs_in_every_type():
    pytest.importorskip("torch")
    found = list(accelerator.torch_ways(accelerator.SMALL, "cpu"))
    assert [line["torch"] for line in found] == ["compiled", "lean", "lean", "frozen", "released"]
    assert not [line["failed"] for line in found if "failed" in line]
