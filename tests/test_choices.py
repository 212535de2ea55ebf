"""Choices that carry their options: a new one is one file and one line, and a user's own is a file or an
object."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import micro
import numpy as np
import optax
import pytest

import fcljax
from fcljax import choices, cli, config, user_files
from fcljax.choices import ChoiceEntry, with_options
from fcljax.data.files.sources import load_dataset
from fcljax.data.owners import ByOwner
from fcljax.data.partition import Quantity
from fcljax.errors import InputError
from fcljax.federated.aggregation import AggregationOptions, make_aggregation
from fcljax.federated.aggregators import Krum
from fcljax.parts.optimisers import AdamW
from fcljax.parts.schedules import Constant, Cosine, Step
from fcljax.scenario import make_scenario
from fcljax.types import TrainingProgress

TINY = dict(tasks=2, clients=2, rounds=1, epochs=1, batch_size=64, image_size=8)

OWN = '''"""Choices of the user's own."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax

from fcljax import option


@dataclasses.dataclass(frozen=True)
class FirstGetsShare:
    """The first client gets a share of the examples, the others divide the rest."""

    first_share: float = option(0.5, positive=True, below=1.0)
    """Fraction of the examples that the first client gets."""

    def __call__(self, labels, clients, rng):
        cut = int(self.first_share * len(labels))
        return [np.arange(cut), *np.array_split(np.arange(cut, len(labels)), clients - 1)]


PARTITION = FirstGetsShare


def AGGREGATOR(stacked, reference, weight, valid, key):
    return {name: jnp.max(leaf, axis=0) for name, leaf in stacked.items()}


OPTIMISER = optax.sgd(0.05)
WRONG = 3


def three(labels, clients, rng):
    return [np.arange(2)] * 3
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A file with choices of the user's own, in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    yield
    user_files.load_file.cache_clear()


@dataclasses.dataclass(frozen=True)
class Halves:
    """The first client gets the first examples of a task."""

    first: int = 3
    """Number of examples of the first client."""

    def __call__(self, labels, clients, rng):
        return [np.arange(self.first), *np.array_split(np.arange(self.first, len(labels)), clients - 1)]


@dataclasses.dataclass(frozen=True)
class Scaled:
    """The sum of all uploads, times a factor."""

    factor: float = 2.0
    """What multiplies the sum."""

    def __call__(self, stacked, reference, weight, valid, key):
        return jax.tree.map(lambda leaf: self.factor * jnp.sum(leaf, axis=0), stacked)


@pytest.fixture
def new_choices(monkeypatch):
    """A partition and an aggregation rule, each one class and one line in a table."""
    monkeypatch.setitem(choices.PARTITIONS, "halves", ChoiceEntry("halves", Halves))
    monkeypatch.setitem(choices.AGGREGATORS, "scaled", ChoiceEntry("scaled", Scaled))
    choices.readers.cache_clear()
    yield
    choices.readers.cache_clear()
    choices._loaded.cache_clear()


def sizes_of_clients(settings):
    """Training examples [T, K]."""
    scenario = make_scenario(load_dataset("digits"), settings, 1, False)
    return np.array([np.diff(of_task[0].offset) for of_task in scenario.partitions])


def test_a_new_partition_is_a_dataclass_and_a_line_in_the_table(new_choices):
    given = {"partition": "halves", "first": 5, "clients": 3}
    settings = config.from_mapping("linear", given, "test")
    assert (sizes_of_clients(settings)[:, 0] == 5).all()
    assert config.from_mapping("linear", {"partition": Halves(5), "clients": 3}, "test") == settings
    with pytest.raises(InputError, match="^first: only halves reads it, and partition is 'dirichlet'"):
        config.from_mapping("linear", {"first": 5}, "test")


def test_a_new_aggregation_rule_is_a_dataclass_and_a_line_in_the_table(new_choices):
    options = with_options(AggregationOptions(), {"aggregator": "scaled", "factor": 3.0})
    rule = make_aggregation(options)
    merged = rule.reduce(jnp.ones((4, 2)), jnp.zeros(2), jnp.ones(4), jnp.ones(4, bool), jax.random.key(0))
    np.testing.assert_array_equal(merged, [12.0, 12.0])
    assert rule.name == "scaled"


def test_a_partition_of_the_user_s_own_is_a_file_with_options(own, capsys):
    given = {"partition": "./mine.py", "first_share": 0.25, "clients": 3}
    sizes = sizes_of_clients(config.from_mapping("linear", given, "test"))
    np.testing.assert_array_equal(sizes[:, 0], np.floor(0.25 * sizes.sum(axis=1)))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["run", "linear", "--partition", "./mine.py", "--help"])
    assert "--first-share X" in capsys.readouterr().out
    with pytest.raises(InputError, match="^first_share: 1.5 is too large; it must be below 1.0"):
        config.from_mapping("linear", given | {"first_share": 1.5}, "test")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"partition": "./none.py"}, "partition: no file './none.py'"),
        ({"partition": "./mine.py:NONE"}, "partition: './mine.py' has no NONE"),
        ({"partition": "./mine.py:WRONG"}, "partition: 3 cannot be called with (labels, clients, rng)"),
        ({"partition": "./mine.py:three"}, "partition: it returned 3 clients; needed: 2"),
        ({"partition": "./mine.py:AGGREGATOR"}, "and (labels, clients, rng) are given"),
        ({"optimiser": "./mine.py:WRONG"}, "optimiser: 3 is not an optax optimiser and has no method build"),
        ({"optimiser": "./mine.py", "lr": 0.5}, "lr: the optimiser has its own learning rate"),
    ],
)
def test_what_a_file_of_the_user_s_own_lacks_is_one_line(given, says, own):
    with pytest.raises(InputError) as error:
        sizes_of_clients(config.from_mapping("linear", {"clients": 2, **given}, "test"))
    assert says in str(error.value)


def test_a_file_of_settings_runs_no_program(own, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("method: linear\npartition: ./mine.py\n")
    assert cli.main(["run", "linear", "--config", "config.yaml"]) == 2
    assert (
        "the partition './mine.py' is a program, and a settings file cannot run one"
        in capsys.readouterr().err
    )


def largest(stacked, reference, weight, valid, key):
    """Merge uploads by their largest values."""
    return jax.tree.map(lambda leaf: jnp.max(leaf, axis=0), stacked)


@pytest.mark.long
def test_an_optimiser_of_optax_trains_as_the_option_of_the_same_numbers(tmp_path):
    mine = fcljax.run("linear", **TINY, optimiser=optax.sgd(0.05), aggregator=largest, progress=False)
    named = fcljax.run("linear", **TINY, optimiser="sgd", lr=0.05, aggregator=largest, progress=False)
    other = fcljax.run("linear", **TINY, optimiser="sgd", lr=0.05, progress=False)
    np.testing.assert_array_equal(mine.accuracy, named.accuracy)
    weights = [result.model.arrays for result in (mine, named, other)]
    same, different = (
        max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(*pair, strict=True))
        for pair in (weights[:2], weights[1:])
    )
    assert same < 1e-6 < different
    assert (mine.settings.optimiser, mine.metrics["config"]["optimiser"]) != ("sgd", "sgd")


def test_learning_rates_rise_in_the_warm_up_and_follow_their_schedule_from_there():
    factors = lambda schedule, rounds: [
        float(schedule(TrainingProgress(jnp.int32(r), rounds, jnp.int32(0), 1))) for r in range(rounds)
    ]
    np.testing.assert_allclose(factors(Constant(3), 5), [0.25, 0.5, 0.75, 1, 1])
    expected = [0.5, 1, 0.5 * (1 + np.cos(np.pi / 4)), 0.5, 0.5 * (1 + np.cos(3 * np.pi / 4))]
    np.testing.assert_allclose(factors(Cosine(1), 5), expected, rtol=1e-6)
    step = Step(lr_divisor=10.0, lr_milestones="0.5,0.75")
    np.testing.assert_allclose(factors(step, 8), [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01], rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lr_schedule": "cosine", "warmup_rounds": 3}, "warmup_rounds: 3 of a task's 3 rounds; nearest: 2"),
        ({"lr_schedule": "step", "lr_milestones": "half"}, "lr_milestones: 'half' are not fractions"),
        ({"lr_schedule": "cosine", "lr_divisor": 2.0}, "lr_divisor: only step reads it"),
        ({"lr_schedule": 3}, "lr_schedule: 3 cannot be called with (progress)"),
    ],
)
def test_a_schedule_that_cannot_be_is_one_line(given, says):
    with pytest.raises(InputError) as error:
        config.from_mapping("linear", {"rounds": 3, **given}, "test")
    assert says in str(error.value)


@pytest.mark.long
def test_a_schedule_scales_the_steps_of_a_client():
    """A factor of 0 leaves every client where it started; one of 1 changes nothing."""
    after = lambda **values: (
        micro.by_hand(
            micro.method_of(
                "fedavg", network=micro.FORMULA, adapter="linear", optimiser="sgd", lr=0.1, **values
            )
        ).params
    )
    start = micro.compiled(micro.method_of("fedavg", network=micro.FORMULA, adapter="linear").init)(
        micro.KEY, micro.SCALE
    ).params
    of = lambda factor: after(lr_schedule=lambda _progress: jnp.float32(factor))
    constant = after()
    # up to the rounding of a mean of equal clients
    chex.assert_trees_all_close(of(0), start, rtol=1e-5)
    chex.assert_trees_all_close(of(1), constant, rtol=1e-5)
    assert not np.allclose(constant.classifier.kernel, start.classifier.kernel, rtol=1e-2)


def test_adamw_adds_the_decay_to_adam_s_direction():
    """Loshchilov and Hutter 2019, algorithm 2, its first step from m = v = 0."""
    params = jnp.array([1.0, -2.0])
    gradient = jnp.array([0.5, 0.25])
    optimiser = AdamW(weight_decay=0.1).build()
    direction, _ = optimiser.update(gradient, optimiser.init(params), params)
    m = (1 - 0.9) * gradient / (1 - 0.9)
    v = (1 - 0.999) * gradient**2 / (1 - 0.999)
    np.testing.assert_allclose(direction, m / (jnp.sqrt(v) + 1e-8) + 0.1 * params, rtol=1e-5)


def test_objects_are_the_same_as_names_with_options():
    flat = {"partition": "quantity", "classes_per_client": 1, "aggregator": "krum", "malicious_bound": 2}
    objects = {"partition": Quantity(classes_per_client=1), "aggregator": Krum(malicious_bound=2)}
    of = lambda values: config.from_mapping("linear", values, "test")
    assert of(flat) == of(objects)


def test_what_a_preset_says_of_its_choice_holds_for_another_with_that_option():
    of = lambda **values: config.from_mapping("pilora", values, "test")
    assert of().weight_decay == of(optimiser="sgd").weight_decay == 1e-5
    assert of(optimiser="sgd").momentum == 0.0


def test_a_file_of_an_earlier_version_has_the_options_of_all_choices():
    old = {"partition": "quantity", "classes_per_client": 3, "alpha": 0.5, "split_ratio": 0.1}
    old |= {"category_ratio": None, "server_step": None, "trim": 0.1, "momentum": 0.0, "task_order": ""}
    assert config.from_mapping("linear", old, "test") == config.from_mapping(
        "linear", {"partition": "quantity", "classes_per_client": 3}, "test"
    )
    with pytest.raises(InputError, match="^split_ratio: only sampled reads it, and partition is 'quantity'"):
        config.from_mapping("linear", old | {"split_ratio": 0.2}, "test")


def test_an_object_of_which_only_text_says_what_it_needs_is_refused():
    with pytest.raises(InputError, match="^partition: ByOwner is written as text, file:PATH"):
        config.from_mapping("linear", {"partition": ByOwner()}, "test")
