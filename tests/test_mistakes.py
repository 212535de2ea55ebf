"""Mistakes of an author: each is one line that names the author's file, or `fcljax check` finds it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro import DATA, FROZEN, NETWORK, SIZES, STREAM, read

import fcljax
from fcljax import ClientRule, MethodEntry, Report, ServerRule, ServerUpdate, config
from fcljax.checks import conformance
from fcljax.errors import InputError
from fcljax.federated.check import Example, check_method
from fcljax.methods import find_method
from fcljax.runs.build import make_method


@dataclasses.dataclass(frozen=True)
class Options:
    strength: float = 1.0
    """A number."""


def entry_of(client_rules=(), server_rules=(), **fields):
    """FedAvg with these parts."""

    def mine(options, run):
        rules = {"client_rules": client_rules, "server_rules": server_rules}
        return fcljax.federate(run, fcljax.linear_learner(run), loss=fcljax.cross_entropy_loss(), **rules)

    return MethodEntry("with a mistake", Options, fields.pop("build", mine), adapter="linear", **fields)


def norm(step):
    return optax.tree.norm(step.trainable.classifier)


# ---- the mistakes, one function or expression each ---------------------------------------------------------


def wrong_shape(step, memory):
    return step.output.logits


def missing_argument(step):
    return 0.0


def misspelt_attribute(step, memory):
    return jnp.sum(step.contxt.payload.trainable.classifier.kernel)


def shapes_that_do_not_match(step, memory):
    return jnp.sum(step.output.logits @ jnp.ones((99, 2)))


def name_that_nobody_sends(step, memory):
    return 0.0 * step.context.payload.sent["mean"]


def task_as_a_number(step, memory):
    return 0.0 if step.context.task.index == 0 else norm(step)


def traced_value_as_a_number(step, memory):
    return float(norm(step))


def state_of_another_shape(context, memory, trainable, state):
    return jnp.zeros(3)


def no_server_update(round, params, state):
    return params


def report_that_was_not_asked_for(round, params, state):
    return ServerUpdate(params, round.reports["prototypes"])


def total_of_another_shape(step, total):
    return jnp.concatenate([total, total])


def misspelt_option(options, run):
    return options.strenght


def forgotten_return(options, run):
    fcljax.federate(run, fcljax.linear_learner(run), loss=fcljax.cross_entropy_loss())


ASKED = Report("mine", lambda context: jnp.zeros(2), total_of_another_shape)
MISTAKES = {
    "wrong_shape": lambda: entry_of((ClientRule("r", wrong_shape),)),
    "missing_argument": lambda: entry_of((ClientRule("r", missing_argument),)),
    "misspelt_attribute": lambda: entry_of((ClientRule("r", misspelt_attribute),)),
    "shapes_that_do_not_match": lambda: entry_of((ClientRule("r", shapes_that_do_not_match),)),
    "name_that_nobody_sends": lambda: entry_of((ClientRule("r", name_that_nobody_sends),)),
    "task_as_a_number": lambda: entry_of((ClientRule("r", task_as_a_number),)),
    "traced_value_as_a_number": lambda: entry_of((ClientRule("r", traced_value_as_a_number),)),
    "state_of_another_shape": lambda: entry_of((ClientRule("r", norm_of, on_end=state_of_another_shape),)),
    "no_server_update": lambda: entry_of(server_rules=(ServerRule("s", no_server_update),)),
    "report_that_was_not_asked_for": lambda: entry_of(
        server_rules=(ServerRule("s", report_that_was_not_asked_for),)
    ),
    "total_of_another_shape": lambda: entry_of(server_rules=(ServerRule("s", keeps, reports=(ASKED,)),)),
    "misspelt_option": lambda: entry_of(build=misspelt_option),
    "forgotten_return": lambda: entry_of(build=forgotten_return),
}


def norm_of(step, memory):
    return norm(step)


def keeps(round, params, state):
    return ServerUpdate(params, state)


def tried(entry):
    """What happens before anything is compiled."""
    settings = config.from_mapping(entry, {"epochs": 1, "batch_size": 4}, "test")
    method = make_method(settings, SIZES, NETWORK)
    check_method(method, read, Example(FROZEN, DATA, STREAM[0]))


def test_a_method_without_a_mistake_passes():
    tried(entry_of((ClientRule("r", norm_of),), (ServerRule("s", keeps),)))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_function_and_its_file(name):
    with pytest.raises(InputError) as error:
        tried(MISTAKES[name]())
    said = str(error.value)
    assert "\n" not in said and re.search(rf"test_mistakes\.py:\d+ {name}\(\)", said), said


def test_mistakes_in_the_entry_name_it():
    with pytest.raises(InputError, match="presets: mine has Options; expected the dataclass of its options"):
        find_method(dataclasses.replace(entry_of(), presets=Options()))
    with pytest.raises(InputError, match="adapter: the entry of mine has 'liner'; did you mean 'linear'"):
        tried(dataclasses.replace(entry_of(), adapter="liner"))


# ---- what only shows when it runs --------------------------------------------------------------------------


def numpy_randomness(step, memory):
    return np.random.normal() * norm(step)


def padding_counts(step, total):
    return total + jnp.sum(step.output.feature, axis=0)


def moved_by_features(round, params, state):
    shift = 1e-3 * jnp.mean(round.reports["mine"])
    return ServerUpdate(
        params._replace(classifier=jax.tree.map(lambda x: x + shift, params.classifier)), state
    )


UNMASKED = Report("mine", lambda context: jnp.zeros(NETWORK.width), padding_counts)
UNSEEN = {
    "numpy_randomness": lambda: entry_of((ClientRule("r", numpy_randomness),)),
    "padding_counts": lambda: entry_of(
        server_rules=(ServerRule("s", moved_by_features, reports=(UNMASKED,)),)
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", UNSEEN)
def test_check_finds_what_no_trace_shows(name):
    settings = config.from_mapping(UNSEEN[name](), {"clients": 4, "batch_size": 4, "epochs": 2}, "test")
    assert not all(statement.holds for statement in conformance.check(settings))
