"""What outlives a task: state of clients belongs to parameters that train in every task, and what clients
measure does not depend on the batch size. `fcljax check` has both statements."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import DATA, FROZEN, KEY, MEANS, PARTITIONS, SIZES, STREAM, TINY, begin, method_of
from test_composition import outcome, settings_of
from test_conformance import EXAMPLES
from test_terms import OWN

from fcljax.adapters import ADAPTERS, find_adapter
from fcljax.checks import federation as tiny
from fcljax.checks.examples import images, network
from fcljax.checks.slots import slots_stay_apart
from fcljax.checks.statistics import batch_size_does_not_matter
from fcljax.data.store import Split
from fcljax.errors import InputError
from fcljax.methods import METHODS
from fcljax.methods.vfcl.posterior import Flat, Posterior
from fcljax.methods.vfcl.vfcl import of_this_task
from fcljax.parts.learner import Params, matching, with_lasting
from fcljax.types import Frozen

SLOTTED = {"lora": {"lora_pairs": "task"}, "prompts": {}, "dualprompt": {}, "coda": {}}


def adapter_of(name, **options):
    entry = find_adapter(name)
    made = dataclasses.replace(entry.presets["intended"], **OWN[name] | options)
    return entry.build(made, SIZES, network(TINY))


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_an_adapter_calls_lasting_are_the_parameters_that_both_tasks_have(name):
    """With random parameters, two tasks train equal values only where they train the same parameters."""
    rng = np.random.default_rng(0)

    def drawn(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape))

    def both(_):
        return True

    for options in ({}, {"lora_pairs": "one"}) if name == "lora" else ({},):
        adapter = adapter_of(name, **options)
        params = jax.tree.map(drawn, jax.eval_shape(adapter.init, KEY, Frozen(FROZEN.network)))
        first, second = (adapter.trainable(params, jax.tree.map(jnp.asarray, task)) for task in STREAM)
        lasts = jax.tree.map(np.array_equal, first, second)
        neither = jax.tree.map(lambda _: False, first)
        assert lasts == with_lasting(neither, jax.tree.map(both, adapter.lasting(first)))
        assert all(jax.tree.leaves(lasts)) == (name not in SLOTTED or bool(options))


def test_of_trainable_parameters_the_lasting_ones_are_picked_and_put_back():
    whole, other = Params({"a": 1, "b": 2}, 3), Params({"a": 4, "b": ()}, ())
    assert matching(whole, other) == Params({"a": 1, "b": ()}, ())
    assert with_lasting(whole, other) == Params({"a": 4, "b": 2}, 3)


@pytest.mark.parametrize("adapter", SLOTTED)
def test_ewc_anchors_what_trains_in_every_task_and_nothing_else(adapter):
    method = method_of("ewc", adapter=adapter, **OWN[adapter] | SLOTTED[adapter])
    state = jax.eval_shape(lambda: method.init_client(KEY, method.init(KEY, FROZEN)))[0]
    kept = {name for name in ("gate", "shared") if jax.tree.leaves(getattr(state.fisher.adapter, name, ()))}
    assert kept == {"prompts": {"gate"}, "dualprompt": {"shared"}}.get(adapter, set())
    assert len(jax.tree.leaves(state.fisher.adapter)) == {"prompts": 2, "dualprompt": 1}.get(adapter, 0)
    assert len(jax.tree.leaves(state.fisher.classifier)) == 2 and state.trainable.stats == ()


@pytest.mark.parametrize(
    ("name", "who"), [("ditto", "ditto keeps a client's own model"), ("local", "clients keep their own")]
)
def test_personal_models_refuse_adapters_whose_parameters_are_of_one_task(name, who):
    for adapter in ("prompts", "dualprompt", "coda"):
        assert outcome(name, adapter, "plain").startswith(
            f"adapter: {name} cannot work with '{adapter}': clients keep one model over all tasks"
        )
    method = method_of(name, **OWN["lora"] | {"lora_pairs": "task"})
    with pytest.raises(InputError, match=f"^adapter: {who} .*; nearest: --adapter lora"):
        begin(method)


def test_vfcl_takes_the_global_prior_for_parameters_of_one_task():
    """DualPrompt's shared prefixes have a prior of the task before; the task's own and its key have none."""
    adapter = adapter_of("dualprompt")
    of_task = jax.tree.map(jnp.asarray, STREAM[0])
    own = adapter.trainable(jax.jit(adapter.init)(KEY, Frozen(FROZEN.network)), of_task)
    sent = jax.tree.map(lambda leaf: leaf + 1, own)
    posterior = lambda params: Posterior(Flat.of(params), Flat.of(params))
    for half in of_this_task(adapter, posterior(sent), posterior(own)):
        found = half.params
        np.testing.assert_array_equal(found.shared, own.shared)
        np.testing.assert_array_equal(found.task_prefix, sent.task_prefix)
        np.testing.assert_array_equal(found.key, sent.key)
    everything = adapter_of("lora", lora_pairs="one")
    pair = everything.trainable(jax.jit(everything.init)(KEY, Frozen(FROZEN.network)), of_task)
    kept = posterior(pair)
    assert of_this_task(everything, posterior(pair), kept) is kept


# ---- the statements ----------------------------------------------------------------------------------------


def of_first_values(method):
    """What the statement on batch sizes says of a method at its first values, without an engine."""
    data = Split(DATA.input, DATA.label, query=jnp.zeros((len(DATA.label), 2)))
    made = tiny.Federation(method, None, FROZEN, data, list(PARTITIONS), *begin(method))
    return batch_size_does_not_matter(made, [tiny.PlayedState(made.server, made.states)] * 2)


@pytest.mark.parametrize("gradients", ["examples", "batches"])
@pytest.mark.long
def test_fisher_information_of_batches_is_caught(gradients):
    options = dict(network=MEANS, adapter="linear", fisher_limit=9.0, batch_size=4)
    found = of_first_values(method_of("ewc", fisher_gradients=gradients, **options))
    assert found.holds == (gradients == "examples"), found
    assert "difference" in found.found


def played(method):
    """What the statement on slots says of a method after a task."""
    made = tiny.tiny_federation(method, images(TINY), EXAMPLES)
    return slots_stay_apart(made, tiny.states_after_rounds(made))


@pytest.mark.long
def test_an_anchor_of_another_slot_is_caught(monkeypatch):
    """EWC on an adapter that says that everything lasts."""
    options = OWN["lora"] | {"lora_pairs": "task", "epochs": 2, "batch_size": 4, "fisher_limit": 9.0}
    assert played(method_of("ewc", **options)).holds
    monkeypatch.setattr("fcljax.parts.learner.Adapter.lasting", property(lambda adapter: lambda part: part))
    found = played(method_of("ewc", **options))
    assert not found.holds and "trainable.adapter.a_q" in found.found


PAIRS = [
    (method, adapter) for method in METHODS for adapter in ADAPTERS if adapter not in METHODS[method].excludes
]


@pytest.mark.long
@pytest.mark.parametrize(("method", "adapter"), [pair for pair in PAIRS if pair[1] in SLOTTED])
def test_slots_of_every_pair_stay_apart(method, adapter):
    """Methods whose clients keep nothing have nothing to show."""
    try:
        made = method_of(method, **settings_of(method, adapter, "plain") | SLOTTED[adapter])
        states = jax.eval_shape(lambda: made.init_client(KEY, made.init(KEY, FROZEN)))
    except InputError as error:
        assert "adapter" in str(error) or "lora_pairs" in str(error)
        return
    if jax.tree.leaves(states):
        found = slots_stay_apart(
            whole := tiny.tiny_federation(made, images(TINY), EXAMPLES), tiny.states_after_rounds(whole)
        )
        assert found.holds, found


@pytest.mark.long
@pytest.mark.parametrize(("method", "adapter"), PAIRS)
def test_what_every_pair_measures_does_not_depend_on_the_batch_size(method, adapter):
    """At its first values; test_conformance.py has every method after training."""
    found = of_first_values(method_of(method, **settings_of(method, adapter, "plain")))
    assert found.holds, found
