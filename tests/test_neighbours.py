"""A prediction does not depend on the images beside it: `fcljax check` catches those that do."""

import pytest
from micro import DATA, FROZEN, begin, method_of
from test_composition import settings_of
from test_conformance import OPTIONS

from fcljax.adapters import ADAPTERS
from fcljax.checks import federation as tiny
from fcljax.checks.neighbours import neighbours_do_not_matter
from fcljax.methods import METHODS


def statement(method):
    """What the statement says of a method at its first values, without an engine."""
    made = tiny.Federation(method, None, FROZEN, DATA, [], *begin(method))
    return neighbours_do_not_matter(made, [tiny.PlayedState(made.server, made.states)] * 4)


@pytest.mark.parametrize("name", ["l2p", "dualprompt"])
def test_the_vote_of_a_batch_is_caught_unless_the_method_names_it(name):
    made = method_of(name, fidelity="released", **OPTIONS[name])
    named = statement(made)
    assert named.holds and made.batchwise[0].replace("_", "-") in named.name
    assert not statement(made._replace(batchwise=())).holds


def test_padding_that_votes_is_caught_though_the_method_names_its_votes():
    """Its predictions take every image of a batch for one that counts."""
    made = method_of("l2p", fidelity="released", **OPTIONS["l2p"])

    def predict(round_context, server, batch):
        return made.predict(round_context, server, batch._replace(mask=batch.mask | True))

    assert not statement(made._replace(predict=predict)).holds


PAIRS = [
    (method, adapter) for method in METHODS for adapter in ADAPTERS if adapter not in METHODS[method].excludes
]


@pytest.mark.long
@pytest.mark.parametrize(("method", "adapter"), PAIRS)
def test_predictions_of_every_pair_do_not_depend_on_neighbours(method, adapter):
    """At its first values. test_conformance.py has every method after training."""
    made = method_of(method, **settings_of(method, adapter, "plain"))
    found = statement(made)
    assert found.holds and made.batchwise == ()
