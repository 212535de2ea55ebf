"""Any adapter under any client rule and any server rule: finite, one trace, the same numbers in every lane
mode.

The network is a toy in which prompts and LoRA pairs change the features, so that all combinations take
minutes and a pairwise design of them seconds.
"""

import dataclasses
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import micro
import numpy as np
import optax
import pytest
import small_runs
from micro import FPPL, PILORA

from fcljax.adapters import find_adapter
from fcljax.federated.engine import Lanes
from fcljax.methods.ewc import EWCOptions, elastic
from fcljax.methods.fppl import debias_classifier, unified_representation
from fcljax.methods.pilora import average_prototypes, reweight_prototypes
from fcljax.parts.classifiers import linear, prototypes
from fcljax.parts.client import Training
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import cross_entropy_loss, learner
from fcljax.parts.proximal import norm_bound, prox
from fcljax.parts.replay import replay
from fcljax.parts.task_start import distil_task_start, send_start_of_task
from fcljax.types import Features, Frozen, Network, Sizes

spec = importlib.util.spec_from_file_location("distill", small_runs.ROOT / "experiments/methods/distill.py")
distill = importlib.util.module_from_spec(spec)
spec.loader.exec_module(distill)

WIDTH, SIZES = 4, Sizes(classes=5, tasks=2, task_classes=3, clients=4, rounds=2)
OPTIONS = {
    "linear": {},
    "full": {"full_lr": 0.05},
    "prompts": {"prompt_length": 2, "prompt_blocks": 1},
    "lora": {"lora_rank": 1, "lora_lr": 0.05},
}


def toy_network() -> Network:
    """Features are a product with one matrix, to which prompts and low-rank updates are added."""

    def apply(params, image, injection, train, mask=None):
        feature = image.reshape(image.shape[0], -1)[:, :8] @ params["kernel"]
        if injection is not None and injection.prompt:
            feature = feature + jnp.mean(injection.prompt[0], axis=-2)
        if injection is not None and injection.lora:
            pair = injection.lora[0]
            feature = feature + feature @ pair.a_q.T @ pair.b_q.T + feature @ pair.a_v.T @ pair.b_v.T
        return Features(jnp.tanh(feature), None, {}), params

    return Network(lambda key: {"kernel": jax.random.normal(key, (8, WIDTH))}, apply, WIDTH, 1, (8, 8, 3))


# Gradient descent and not Adam, which makes whole steps of the rounding noise where a student still equals
# its teacher.
GRADIENT = optax.identity()
NETWORK = toy_network()
FROZEN = Frozen(NETWORK.init(jax.random.key(4)))
CLIENT_RULES = {
    "none": lambda model: (),
    "prox": lambda model: (prox(0.1),),
    "norm_bound": lambda model: (norm_bound(0.3),),
    "ewc": lambda model: (elastic(EWCOptions(10.0, 1e-2), model, 4),),
    "lwf": lambda model: (distil_task_start(3.0, 2.0),),
    "replay": lambda model: (replay(5, 4), distil_task_start(1.0, 2.0)),
    "unified": lambda model: (unified_representation(FPPL),),
}
SERVER_RULES = {
    "none": lambda run: (),
    "debias": lambda run: (debias_classifier(FPPL, run),),
    "reweight": lambda run: (reweight_prototypes(PILORA, run),),
    "average": lambda run: (average_prototypes(run),),
    "distill": lambda run: (distill.distil_on_drawn_features(distill.DistillOptions(2, 1e-4), run),),
}
ALL = [
    case
    for case in itertools.product(OPTIONS, CLIENT_RULES, SERVER_RULES)
    if case[1] != "unified" or case[2] == "debias"  # it reads what this step sends
]


def pairwise(cases):
    """A few of the cases, in which every pair of parts that occurs in any of them occurs; always the same."""
    pairs = lambda case: {(i, j, case[i], case[j]) for i, j in itertools.combinations(range(3), 2)}
    wanted, chosen = set().union(*map(pairs, cases)), []
    while wanted:
        best = max(cases, key=lambda case: len(pairs(case) & wanted))
        chosen.append(best)
        wanted -= pairs(best)
    return chosen


FEW = pairwise(ALL)


def run_of(adapter: str) -> Run:
    entry = find_adapter(adapter)
    options = dataclasses.replace(entry.presets["intended"], **OPTIONS[adapter])
    return Run(SIZES, NETWORK, entry.build(options, SIZES, NETWORK), Training(2, 4, 0.05, GRADIENT))


def compose(adapter, client_rule, server_rule):
    run, by_prototypes = run_of(adapter), server_rule in ("reweight", "average")
    classifier = prototypes if by_prototypes else linear
    model = learner(NETWORK, run.adapter, classifier(WIDTH, SIZES.classes))
    loss = cross_entropy_loss("seen" if client_rule == "replay" else "current")
    server_rules = SERVER_RULES[server_rule](run)
    if client_rule in ("lwf", "replay"):
        server_rules += (send_start_of_task(),)
    return federate(
        run, model, loss=loss, client_rules=CLIENT_RULES[client_rule](model), server_rules=server_rules
    )


def check(case, ways):
    method = compose(*case)
    server, states = micro.begin(method, FROZEN)
    results = []
    for lanes in ways:
        engine = micro.engine_of(method, lanes, frozen=FROZEN)
        server_, states_, report = micro.play(engine, server, states, frozen=FROZEN)[-1]
        floats = [x for x in jax.tree.leaves((server_, states_)) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert all(np.all(np.isfinite(x)) for x in floats)
        assert np.isfinite(report.metrics["loss"]) and report.rejected == report.refused == 0
        assert set(engine.traces.values()) == {1}
        results.append((server_, states_))
    moved = [
        not np.allclose(a, b) for a, b in zip(*map(jax.tree.leaves, (server, results[0][0])), strict=True)
    ]
    assert any(moved)
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3), results[0], other)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] if i else []) for i, case in enumerate(FEW)]
)
def test_every_pair_of_parts_works_together(case):
    """Every twenty-fourth one in `make test`, since each compiles an engine."""
    check(case, [Lanes(2, "vmap")])


@pytest.mark.long
@pytest.mark.parametrize("case", FEW[2::32], ids="-".join)
def test_lanes_do_not_matter_for_combined_parts(case):
    """A few here; all of them, in every mode, in `make test-long`."""
    check(case, [Lanes(2, "vmap"), Lanes(1, "loop")])


@pytest.mark.long
@pytest.mark.parametrize("case", ALL, ids="-".join)
def test_every_combination_works_in_every_lane_mode(case):
    check(case, [Lanes(2, "vmap"), Lanes(1, "loop"), Lanes(2, "unroll"), Lanes(2, "loop")])


def test_the_design_holds_every_pair():
    for i, j in itertools.combinations(range(3), 2):
        assert {(case[i], case[j]) for case in FEW} == {(case[i], case[j]) for case in ALL}
    assert len(FEW) < len(ALL) / 2 and len(ALL) == 4 * (6 * 5 + 1)
