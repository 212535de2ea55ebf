"""Every method on every adapter, with and without what a run may add to it: built and traced by shapes alone,
each ends in a method that works or in one line that says why it cannot."""

import pytest
from micro import DATA, FROZEN, STREAM, method_of, read
from test_conformance import OPTIONS
from test_terms import OWN

from fcljax import config
from fcljax.adapters import ADAPTERS
from fcljax.errors import InputError
from fcljax.federated.check import Example, check_method
from fcljax.methods import METHODS

VARIANTS = {
    "plain": {},
    "median": {"aggregator": "median"},
    "liar": {"malicious": 1, "attack": "sign_flip"},
    "private": {"clip_norm": 1.0, "noise_multiplier": 1.0},
}


def settings_of(method: str, adapter: str, variant: str) -> dict:
    """Small ones, of which the pair reads each."""
    wanted = OPTIONS[method] | OWN[adapter] | {"adapter": adapter, "epochs": 1, "batch_size": 4}
    known = {field.name for field in config.fields_of(config.run_class(method, adapter))}
    return {name: value for name, value in wanted.items() if name in known} | VARIANTS[variant]


def outcome(method: str, adapter: str, variant: str) -> str:
    """Empty where the method works, or the line that refuses it."""
    try:
        made = method_of(method, **settings_of(method, adapter, variant))
        check_method(made, read, Example(FROZEN, DATA, STREAM[0]))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("method", "adapter", "variant", "refused"),
    [
        ("vfcl", "linear", "plain", ""),  # an adapter without parameters
        # clients that read examples as in evaluation, to choose exemplars
        pytest.param("vfcl", "dualprompt", "liar", "", marks=pytest.mark.long),
        pytest.param("glfc", "dualprompt", "median", "", marks=pytest.mark.long),
        (
            "vfcl",
            "lora",
            "median",
            "aggregator: 'median' would replace conflation; nearest: 'mean'",
        ),
        ("fedncm", "coda", "private", "adapter: fedncm cannot work with 'coda'"),
    ],
)
def test_a_pair_works_or_is_refused_in_one_line(method, adapter, variant, refused):
    found = outcome(method, adapter, variant)
    assert found.startswith(refused) and bool(found) == bool(refused) and "\n" not in found, found


@pytest.mark.long
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("method", METHODS)
def test_every_pair_works_or_is_refused_in_one_line(method, adapter):
    for variant in VARIANTS:
        refused = outcome(method, adapter, variant)
        assert "\n" not in refused and (not refused or ":" in refused), (variant, refused)
