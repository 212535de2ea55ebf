"""A prediction does not depend on the images beside it: `fcljax check` catches those that do."""

import pytest
from micro import DATA, FROZEN, begin, method_of
from test_composition import settings_of
from test_conformance import OPTIONS

from fcljax.adapters import ADAPTERS
from fcljax.checks import federation as tiny
from fcljax.checks.neighbours import neighbours_do_not_matter


def statement(method):
    """What the statement says of a method at its first values, without an engine."""
    made = tiny.Federation(method, None, FROZEN, DATA, [], *begin(method))
    return neighbours_do_not_matter(made, [tiny.PlayedState(made.server, made.states)] * 4)


CHOICES = [
    ("l2p", "l2p_eval_batchwise"),
    ("dualprompt", "dual_eval_batchwise"),
    ("dualprompt", "dual_reshape_bug"),
]


@pytest.mark.parametrize(("name", "by"), CHOICES)
@pytest.mark.long
def test_a_prediction_by_the_batch_is_caught_unless_the_method_names_it(name, by):
    made = method_of(name, **OPTIONS[name] | {by: True})
    named = statement(made)
    assert named.holds and f"by --{by.replace('_', '-')}, not on padding" in named.name
    assert not statement(made._replace(batchwise=())).holds


@pytest.mark.long
def test_padding_that_votes_is_caught_though_the_method_names_its_votes():
    """Its predictions take every image of a batch for one that counts."""
    made = method_of("l2p", fidelity="released", **OPTIONS["l2p"])

    def predict(round_context, server, batch):
        return made.predict(round_context, server, batch._replace(mask=batch.mask | True))

    assert not statement(made._replace(predict=predict)).holds


@pytest.mark.long
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("method", ["linear", "vfcl"])
def test_predictions_on_every_adapter_do_not_depend_on_neighbours(method, adapter):
    """At their first values, VFCL's by drawn parameters too. test_conformance.py has every method on its own
    adapter, after training."""
    made = method_of(method, **settings_of(method, adapter, "plain"))
    found = statement(made)
    assert found.holds and made.batchwise == ()
