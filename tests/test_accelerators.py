"""Accelerators that are not here: every method's programs lower for them, and what is said of their compiled
programs is counted rightly."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import DATA, FROZEN, KEY, PARTITIONS, SIZES, STREAM, engine_of, method_of
from small_runs import some
from test_conformance import OPTIONS
from toys import same

from fcljax import cli, config
from fcljax.checks import chips, plan
from fcljax.checks.traffic import Kernel, kernels, traffic
from fcljax.commands import planning
from fcljax.errors import InputError
from fcljax.federated.engine import Lanes
from fcljax.federated.schedule import ClientPartition
from fcljax.mesh import abstract_mesh, compiler_options
from fcljax.models import products
from fcljax.models.shapes import ViTConfig
from fcljax.models.vit import vit_network
from fcljax.runs.build import Experiment
from fcljax.runs.inputs import TRAIN_IN_BFLOAT16, compute_type, load_network
from fcljax.runs.machine import Machine
from fcljax.runs.programs import RoundProgram, engine_state, programs_of


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
def test_all_programs_of_a_round_lower_for_gpus_and_tpus(name):
    """Without float64, which they lack or are slow at, and without a call of the host."""
    method = method_of(name, **{"epochs": 1, "batch_size": 4} | OPTIONS[name])
    method = method._replace(queries=False)  # of the test's own images no query features are kept
    scenario = SimpleNamespace(tasks=STREAM, partitions=[[each] for each in PARTITIONS])
    made = settings()
    exp = Experiment(made, method, engine_of(method), FROZEN, DATA, None, scenario, None, SIZES, KEY)
    # decompositions are calls of each vendor's library, which jax does not promise to keep for years
    unchecked = [jax.export.DisabledSafetyCheck.custom_call(each) for each in LIBRARIES]
    names = []
    for program in programs_of(exp):
        export = jax.export.export(program.function, platforms=("cuda", "tpu"), disabled_checks=unchecked)
        text = export(*program.arguments).mlir_module()
        names.append(program.name)
        assert "f64>" not in text and "callback" not in text, program.name
    assert names[0] == "broadcast"
    loops = [name for name in names if name.endswith("phase 0")]
    assert loops == [f"{each.when} {i} phase 0" for i, each in enumerate(method.rounds)]


LIBRARIES: tuple[str, ...] = ()
COMPILED = Path(__file__).parent.parent / "docs" / "results" / "accelerators.jsonl"


# ---- counting ----------------------------------------------------------------------------------------------


def test_products_are_counted_as_often_as_their_loops_run():
    """2 * 3 * 4 * 5 operations a product: one outside, and 7 x 2 in loops, of which a compiler counts one."""
    a, b = jnp.ones((3, 4)), jnp.ones((4, 5))

    def twice(x, _):
        return x, jnp.sum(x @ b) + jnp.sum(jax.lax.map(lambda y: y @ b, jnp.stack([x])))

    jaxpr = jax.make_jaxpr(lambda a: (a @ b, jax.lax.scan(twice, a, None, length=7)))(a).jaxpr
    assert chips.product_flops(jaxpr) == 120 * (1 + 7 * 2)
    assert chips.product_flops(jaxpr, repeated=False) == 120 * 3


def test_products_of_which_nothing_is_used_are_not_counted():
    """The backward pass of a frozen layer also writes the gradient of its kernel."""
    x, kernel = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 4), jnp.bfloat16)
    gradient = jax.grad(lambda x: jnp.sum(products.matmul(x, kernel)))
    assert chips.product_flops(jax.make_jaxpr(gradient)(x).jaxpr) == 2 * 8 * 16 * 4


def test_convolutions_are_counted_as_products():
    """3 x 3 pixels of 4 channels for each of 2 x 8 x 8 pixels of 6; gradients as much, up to the edges."""
    image, kernel = jnp.ones((2, 16, 16, 4)), jnp.ones((3, 3, 4, 6))

    def convolve(image, kernel):
        axes = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(image, kernel, (2, 2), "SAME", dimension_numbers=axes)

    expected = 2 * (3 * 3 * 4) * (2 * 8 * 8 * 6)
    assert chips.product_flops(jax.make_jaxpr(convolve)(image, kernel).jaxpr) == expected
    for argument in (0, 1):
        gradient = jax.grad(lambda *given: jnp.sum(convolve(*given)), argument)
        found = chips.product_flops(jax.make_jaxpr(gradient)(image, kernel).jaxpr)
        assert found == pytest.approx(expected, rel=0.3), argument


def test_of_a_conditional_the_larger_branch_is_counted():
    a = jnp.ones((8, 8))
    branches = lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x @ x)
    assert chips.product_flops(jax.make_jaxpr(branches)(a).jaxpr) == 2 * 2 * 8**3


def test_a_compiled_program_is_counted_with_all_passes_of_its_loops():
    a = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def loop(a):
        return jax.lax.scan(lambda x, _: (x @ a, None), a, None, length=9)[0]

    found = chips.report(RoundProgram("loop", jax.jit(loop), (a,), steps=2), "cpu")
    assert found.useful == pytest.approx(1, abs=0.05)
    assert found.flops == pytest.approx(9 * 2 * 64**3, rel=0.05)
    chip = chips.CHIPS["v5e"]
    assert sum(kernel.calls * kernel.flops for kernel in found.kernels) == 9 * 2 * 64**3
    moved = sum(kernel.calls * kernel.traffic for kernel in found.kernels)
    assert moved == pytest.approx(found.traffic, rel=0.01)
    assert found.round_seconds(chip) == 2 * sum(map(chip.rates.seconds, found.kernels))
    assert 0 < found.share(chip) < 1


def test_programs_for_gpus_leave_all_products_to_cublas():
    """As XLA does on a GPU that is there, for most; without one it would take kernels of its own."""
    lowered = Mock(spec=jax.stages.Lowered)
    lowered.compile.side_effect = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: needs 4096 bytes")
    traced = Mock(spec=jax.stages.Traced, jaxpr=jax.make_jaxpr(lambda a: a)(1.0))
    traced.lower.return_value = lowered
    program = RoundProgram("step", SimpleNamespace(trace=lambda: traced), (), 1)
    for kind, expected in (("gpu", False), ("tpu", None)):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            chips.report(program, kind)
        (options,) = lowered.compile.call_args.args
        assert options.get("xla_gpu_enable_triton_gemm") is expected


MODULE = """HloModule step, is_scheduled=true

%part (a: f32[100,64], i: s32[]) -> f32[4,64] {
  %a = f32[100,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %rows = f32[4,64]{1,0} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={4,64}
  ROOT %twice = f32[4,64]{1,0} add(%rows, %rows)
}

%put (a: f32[100,64], i: s32[], rows: f32[4,64]) -> f32[100,64] {
  %a.1 = f32[100,64]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %rows.1 = f32[4,64]{1,0} parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %put.1 = f32[100,64]{1,0} dynamic-update-slice(%a.1, %rows.1, %i.1, %zero.1)
}

%body (t: (f32[100,64], s32[])) -> (f32[100,64], s32[]) {
  %t = (f32[100,64]{1,0}, s32[]) parameter(0)
  %a.2 = f32[100,64]{1,0} get-tuple-element(%t), index=0
  %i.2 = s32[] get-tuple-element(%t), index=1
  %rows.2 = f32[4,64]{1,0} fusion(%a.2, %i.2), kind=kLoop, calls=%part
  %put.2 = f32[100,64]{1,0} fusion(%a.2, %i.2, %rows.2), kind=kLoop, calls=%put
  ROOT %t.1 = (f32[100,64]{1,0}, /*index=1*/s32[]) tuple(%put.2, %i.2)
}

%less (t: (f32[100,64], s32[])) -> pred[] {
  %t.2 = (f32[100,64]{1,0}, s32[]) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%cheap (a: f32[100,64]) -> f32[100,64] {
  ROOT %a.3 = f32[100,64]{1,0} parameter(0)
}

%dear (a: f32[100,64]) -> f32[100,64] {
  %a.4 = f32[100,64]{1,0} parameter(0)
  ROOT %e = f32[100,64]{1,0} exponential(%a.4)
}

ENTRY %main (a: f32[100,64], i: s32[], p: pred[]) -> f32[100,64] {
  %a.5 = f32[100,64]{1,0} parameter(0)
  %i.3 = s32[] parameter(1)
  %p = pred[] parameter(2)
  %t.3 = (f32[100,64]{1,0}, s32[]) tuple(%a.5, %i.3)
  %w = (f32[100,64]{1,0}, s32[]) while(%t.3), condition=%less, body=%body, KNOWN
  %a.6 = f32[100,64]{1,0} get-tuple-element(%w), index=0
  %c = f32[100,64]{1,0} conditional(%p, %a.6, %a.6), true_computation=%cheap, false_computation=%dear
  %s = ((bf16[100,64]{1,0}), bf16[100,64]{1,0}) all-reduce-start(%c), to_apply=%less
  ROOT %d = bf16[100,64]{1,0:T(8,128)(2,1)} all-reduce-done(%s)
}
"""


def test_bytes_are_those_of_kernels_as_often_as_they_run():
    """Of arrays of which a kernel takes or changes 4 rows of 100, these rows. The loop has 7 passes; of the
    branches the dearer one counts; an exchange reads float32 and writes bfloat16."""
    rows, whole, index = 4 * 64 * 4, 100 * 64 * 4, 4
    step = (rows + index + rows) + (index + rows + rows)
    rest = 2 * whole + whole + whole // 2
    known = 'backend_config={"known_trip_count":{"n":"7"}}'
    assert traffic(MODULE.replace("KNOWN", known)) == 7 * step + rest
    assert traffic(MODULE.replace("KNOWN", "backend_config={}")) == step + rest


KERNELS = """HloModule step, is_scheduled=true

%gelu (a: bf16[128,64]) -> bf16[128,64] {
  %a = bf16[128,64]{1,0} parameter(0)
  %wide = f32[128,64]{1,0} convert(%a)
  %erf = f32[128,64]{1,0} erf(%wide)
  %exp = f32[128,64]{1,0} exponential(%erf)
  ROOT %out = bf16[128,64]{1,0} convert(%exp)
}

%exact (a: f32[8,16,32], b: f32[8,32,4]) -> f32[8,16,4] {
  %a.1 = f32[8,16,32]{2,1,0} parameter(0)
  %b.1 = f32[8,32,4]{2,1,0} parameter(1)
  ROOT %dot = f32[8,16,4]{2,1,0} dot(%a.1, %b.1), lhs_contracting_dims={2}, operand_precision={highest,highest}
}

ENTRY %main (x: bf16[128,32], k: bf16[32,64], a: f32[8,16,32], b: f32[8,32,4], i: f32[2,8,8,3], f: f32[3,3,3,6]) -> bf16[128,64] {
  %x = bf16[128,32]{1,0} parameter(0)
  %k = bf16[32,64]{1,0} parameter(1)
  %a.2 = f32[8,16,32]{2,1,0} parameter(2)
  %b.2 = f32[8,32,4]{2,1,0} parameter(3)
  %i = f32[2,8,8,3]{3,2,1,0} parameter(4)
  %f = f32[3,3,3,6]{3,2,1,0} parameter(5)
  %gemm = (bf16[128,64]{1,0}, s8[4194304]{0}) custom-call(%x, %k), custom_call_target="__cublas$lt$matmul", backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]}}
  %y = bf16[128,64]{1,0} get-tuple-element(%gemm), index=0
  %p = f32[8,16,4]{2,1,0} fusion(%a.2, %b.2), kind=kLoop, calls=%exact
  %c = f32[2,4,4,6]{3,2,1,0} convolution(%i, %f), window={size=3x3 stride=2x2}, dim_labels=b01f_01io->b01f
  ROOT %z = bf16[128,64]{1,0} fusion(%y), kind=kLoop, calls=%gelu
}
"""  # noqa: E501


def test_kernels_compute_what_is_fused_into_them():
    """A product in cuBLAS, whose workspace is not moved, an exact one in a fusion, a convolution, GELU."""
    gemm, dot, convolution, gelu = kernels(KERNELS)
    assert (gemm.flops, gemm.dtype) == (2 * 128 * 32 * 64, "bfloat16")
    assert gemm.traffic == 2 * (128 * 32 + 32 * 64 + 128 * 64)
    assert (dot.flops, dot.dtype) == (2 * 8 * 16 * 32 * 4, "float32")
    assert (convolution.flops, convolution.dtype) == (2 * (2 * 4 * 4 * 6) * 27, "tf32")
    assert (gelu.flops, gelu.erf, gelu.exponentials) == (0, 128 * 64, 128 * 64)


def test_a_kernel_takes_as_long_as_what_takes_it_longest():
    attention = {"forward": 20.0, "backward": 5.0}
    rates = chips.Rates({"bfloat16": 100.0}, 10.0, attention, erf=4.0, exponentials=8.0)
    seconds = [
        rates.seconds(Kernel(2, 10)),
        rates.seconds(Kernel(2, 10, 300.0)),
        rates.seconds(Kernel(2, 10, 300.0, attention="backward")),
        rates.seconds(Kernel(2, 10, erf=8, exponentials=8)),
    ]
    assert seconds == [2 * 1.0, 2 * 3.0, 2 * 60.0, 2 * 3.0]


@pytest.mark.parametrize("dtype", some(["bfloat16", "float32"], ["bfloat16"]))
def test_bytes_are_those_that_this_machines_compiler_counts(dtype):
    """Of a ViT and its gradient, within 1 %. The compiler for GPUs writes such modules and counts nothing."""
    network = vit_network(ViTConfig(32, 8, width=64, depth=2, heads=4, mlp=64, dtype=dtype))
    image, params = jax.ShapeDtypeStruct((8, 32, 32, 3), jnp.float32), jax.eval_shape(network.init, KEY)

    def total(image, params):
        return jnp.sum(network.apply(params, image, None, True)[0].cls)

    compiled = jax.jit(jax.grad(total)).lower(image, params).compile()
    expected = compiled.cost_analysis()["bytes accessed"]
    assert traffic(compiled.as_text()) == pytest.approx(expected, rel=0.01)


@pytest.mark.long
def test_a_cpu_rounds_activations_where_accelerators_are_asked_to():
    """A ViT's bfloat16 features have the same bits with the options of programs for GPUs."""
    network = vit_network(ViTConfig(32, 8, width=64, depth=2, heads=4, mlp=64, dtype="bfloat16"))
    given = network.init(KEY), jax.random.normal(KEY, (8, 32, 32, 3))
    lowered = jax.jit(lambda params, image: network.apply(params, image, None, True)[0].cls).lower(*given)
    assert compiler_options("gpu")
    free, rounded = (lowered.compile(each)(*given) for each in ({}, compiler_options("gpu")))
    np.testing.assert_array_equal(rounded, free)


# ---- recorded compilations ---------------------------------------------------------------------------------

RECORDED = [json.loads(line) for line in COMPILED.read_text().splitlines()]


@pytest.mark.parametrize("line", RECORDED, ids=lambda line: f"{line['method']} {line['chip']} {line['code']}")
def test_a_training_step_computes_nothing_twice(line):
    """As compiled by `experiments/accelerators.py`, which needs the chips' compilers: at least 95 % of the
    operations are the program's as written. Of FPPL's step on a TPU once 51 % were."""
    assert line["useful"] >= 0.95
    kernels = [Kernel(*kernel) for kernel in line["kernels"]]
    moved = sum(kernel.calls * kernel.traffic for kernel in kernels)
    assert moved == pytest.approx(line["traffic"], rel=1e-3)
    # kernels count a convolution's products with its padding, and a TPU's compiler does not
    tolerance = 0.1 if line["method"] == "vfcl" else 0.03
    products = sum(kernel.calls * kernel.flops for kernel in kernels)
    assert products == pytest.approx(line["flops"], rel=tolerance)


@pytest.mark.parametrize("chip", ["v5e", "h200"])
def test_the_step_of_every_paper_is_recorded(chip):
    recorded = {line["method"] for line in RECORDED if line["chip"] == chip}
    assert recorded >= {"fppl", "pilora", "hepco", "pmae", "vfcl"}


def test_the_step_that_was_measured_on_an_h200_is_predicted():
    """FPPL's took about 48 ms (docs/accelerators.md); the program has lost a tenth of its bytes since."""
    found = [
        sum(chips.CHIPS["h200"].rates.seconds(Kernel(*kernel)) for kernel in line["kernels"])
        for line in RECORDED
        if (line["method"], line["chip"], line["code"]) == ("fppl", "h200", "0edea00")
    ]
    assert len(found) == 1 and 0.042 <= found[0] <= 0.048


# ---- plans -------------------------------------------------------------------------------------------------


def settings(method="linear", **values):
    return config.resolve(config.from_mapping(method, values, "test"))


@pytest.mark.long
def test_a_plan_says_what_fits_a_chip_and_how_long_a_round_is_at_best(monkeypatch):
    """On a machine that stands for the chip: this CPU. The step needs less with fewer images at a time."""
    monkeypatch.setattr(plan, "machine", lambda name: (Machine("tpu"), None))
    small = chips.CHIPS["v5e"]._replace(memory=2**24)
    monkeypatch.setitem(chips.CHIPS, "v5e", small)
    calls = []

    def reports(exp, placement, kind, only):
        work = (Kernel(1, 10**9, 1e12),)
        if only == plan.EVALUATIONS:
            yield chips.Footprint("evaluation", evaluation, 0, 1e12, 1e9, 1.0, {}, 0.0, 10, work)
            return
        images = exp.engine.lanes.count * (exp.settings.microbatch or exp.settings.batch_size)
        calls.append((exp.settings.dtype, exp.engine.lanes.count, exp.settings.microbatch))
        need = 2**20 * images
        yield chips.Footprint("round 0 phase 0", need, need, 1e12, 1e9, 1.0, {}, 0.0, 6, work)

    monkeypatch.setattr(plan, "reports", reports)
    stand = plan.Stand(images=400, classes=10, side=32)
    evaluation = 2**20
    found = plan.plan(settings(batch_size=32, lanes=1), "v5e", stand)
    assert calls == [("bfloat16", 1, 0), ("bfloat16", 1, 8)]
    assert found.settings.microbatch == 8 and "--microbatch 8" in found.line
    assert found.memory == found.beside + 2**23 <= small.memory
    rate = small.rates.products["bfloat16"]
    assert found.round_seconds == pytest.approx(6 * 1e12 / rate)
    # five tasks of equal size: evaluations of 1/5, 2/5, .. of the test images
    rounds = found.settings.rounds * found.settings.tasks
    assert found.run_seconds == pytest.approx(rounds * found.round_seconds + 3 * 10 * 1e12 / rate)
    on_gpu = found._replace(chip=chips.CHIPS["h200"])
    said = {chip.kind: planning.lines(each, "") for chip, each in ((small, found), (on_gpu.chip, on_gpu))}
    shortest, longest = (planning._time(factor * found.run_seconds) for factor in small.rates.uncertainty)
    assert f"{shortest} to {longest}, by rates assumed" in said["tpu"][1]
    assert "by rates measured" in said["gpu"][1]  # no TPU has been measured
    evaluation = 2**24
    with pytest.raises(
        InputError, match="^eval_batch_size: with 64 images .* nearest: --eval-batch-size 32$"
    ):
        plan.plan(settings(batch_size=32, lanes=1), "v5e", stand)


@pytest.mark.long
def test_a_plan_has_images_of_another_data_set_where_a_method_reviews_some():
    stand = plan.Stand(images=400, classes=10, side=32)
    chosen = settings("cfed", surrogate_images=12, image_size=16)
    exp = plan.experiment(chosen, Machine("tpu"), chips.CHIPS["v5e"], stand)
    assert (exp.frozen.surrogate.shape, exp.frozen.surrogate.dtype) == ((12, 16, 16, 3), np.uint8)


@pytest.mark.long
def test_what_the_engine_holds_on_a_chip_grows_with_the_chips_own_clients():
    """FPPL by shapes: 16 clients on 2 chips, and 8,000 on 1,000, which are 8 a chip in both. The server's
    prototypes of all clients are too small here to be shared."""
    found = []
    for clients, chips_ in ((16, 2), (8000, 1000)):
        counts = np.full(clients, 5)
        offset = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        examples = np.arange(offset[-1], dtype=np.int32) % 60
        own = ClientPartition(examples, offset, np.ones((clients, SIZES.classes), np.int32))
        sizes, where = SIZES._replace(clients=clients), abstract_mesh(chips_)
        method = method_of("ewc", sizes=sizes, epochs=1, batch_size=4)
        engine = engine_of(method, Lanes(8 * chips_, "vmap"), [own], mesh=where)
        scenario = SimpleNamespace(tasks=STREAM, partitions=[[own]])
        exp = Experiment(settings(), method, engine, FROZEN, DATA, None, scenario, None, sizes, KEY)
        assert sum(player.capacity.slots for player in engine.players[:1]) == 8
        found.append(engine_state(exp))
    few, many = found
    assert few == many and few.clients > 0 and few.slots > few.clients


@pytest.mark.long
def test_a_thousand_chips_hold_at_most_two_gigabytes_of_engine_state_each():
    """FPPL with a ViT-B/16 and 8,000 slots, which were 16.4 GB on every chip; the table is in
    docs/accelerators.md."""
    options = {"backbone": "vit_b16", "partition": "iid", "clients": 8000, "lanes": 8000, "batch_devices": 1}
    cfg = config.resolve(config.from_mapping("fppl", options, "test"))
    exp, state = plan.many_chips(cfg, "v5e", 1000, plan.Stand(800_000, 100, 8))
    assert [player.capacity.slots for player in exp.engine.players] == [8]
    assert state.total <= 2e9
    assert state.slots > 8 * 1e6 and state.server > 8000 * 100 * 768 * 4 / 1000


def test_a_compiler_that_is_missing_is_named_with_what_installs_it(capsys, monkeypatch):
    def missing(package):
        raise chips.metadata.PackageNotFoundError

    monkeypatch.setattr(chips.metadata, "version", missing)
    assert cli.main(["plan", "fppl", "--chip", "v5e"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "fcljax: chip: libtpu is needed to compile for it and is not installed; install it with: "
        "pip install -e '.[accelerators-aot]' in a clone of fcljax\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chip", "v5"], "chip: unknown value 'v5'; did you mean"),
        ([], "chip: none given; choose from: "),
        (["--chip", "v5e", "--out", "there"], "out: plan writes no run directory"),
    ],
)
def test_a_plan_refuses_what_it_cannot_answer_in_one_line(words, said, capsys):
    assert cli.main(["plan", "fppl", *words]) == 2
    assert said in capsys.readouterr().err


# ---- number formats ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "given", "kind"),
    [
        ("cpu", {}, "float32"),
        ("tpu", {}, "bfloat16"),
        ("gpu", {}, "bfloat16"),
        ("gpu", {"dtype": "float32"}, "float32"),
        ("cpu", {"dtype": "bfloat16"}, "bfloat16"),
        ("gpu", {"dtype": "tf32"}, "tf32"),
        ("tpu", {"adapter": "full"}, "float32"),  # what trains
        ("tpu", {"adapter": "full", "dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_a_frozen_network_computes_in_bfloat16_on_accelerators_alone(backend, given, kind):
    cfg = config.resolve(config.from_mapping("ewc", given, "test"))
    assert compute_type(cfg, backend) == kind


@pytest.mark.parametrize(
    ("backend", "given", "kind"),
    [("gpu", {}, "bfloat16"), ("cpu", {}, "float32"), ("gpu", {"dtype": "float32"}, "float32")],
)
def test_a_network_trains_in_bfloat16_where_that_was_measured(backend, given, kind):
    for method in TRAIN_IN_BFLOAT16:
        cfg = config.resolve(config.from_mapping(method, {"adapter": "full", **given}, "test"))
        assert compute_type(cfg, backend) == kind


def test_a_network_that_trains_in_bfloat16_begins_with_all_bits_of_its_parameters():
    """Products round them; what the optimiser changes is float32. A frozen network is stored rounded."""

    def params(**values):
        cfg = config.resolve(config.from_mapping("ewc", {"backbone": "vit_micro", **values}, "test"))
        return load_network(cfg, None).params

    exact = params(adapter="full", dtype="float32")
    same(params(adapter="full", dtype="bfloat16"), exact)
    types = {str(leaf.dtype) for leaf in jax.tree.leaves(params(adapter="lora", dtype="bfloat16"))}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(exact)} == {"float32"} and "bfloat16" in types
