"""The accountant against closed forms and a value that dp-accounting computed."""

import math
import sys

import pytest

from fcljax.errors import InputError
from fcljax.federated.privacy import by_round, epsilon


def gaussian_delta(epsilon_: float, sigma: float) -> float:
    """The exact delta of one Gaussian mechanism (Balle and Wang 2018, theorem 5)."""
    normal = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))
    return normal(0.5 / sigma - epsilon_ * sigma) - math.exp(epsilon_) * normal(
        -0.5 / sigma - epsilon_ * sigma
    )


def gaussian_rdp(sigma: float, rounds: int, delta: float) -> float:
    """Renyi's bound for full participation, over all orders (Canonne et al. 2020, proposition 12)."""
    orders = [1 + 0.01 * i for i in range(1, 10_000)]
    bound = lambda a: rounds * a / (2 * sigma**2) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1)
    return min(map(bound, orders))


@pytest.mark.parametrize("sigma, rounds", [(1.0, 1), (5.0, 1), (5.0, 20)])
def test_with_everybody_taking_part_it_is_the_gaussian_mechanism(sigma, rounds):
    pytest.importorskip("dp_accounting")
    found = epsilon(sigma, participation=1.0, rounds=rounds, delta=1e-5)
    assert found == pytest.approx(gaussian_rdp(sigma, rounds, 1e-5), rel=0.01)
    # twenty rounds of sigma 5 are one of sigma 5 / sqrt(20); a bound must not be below the truth
    assert (
        gaussian_delta(found, sigma / math.sqrt(rounds))
        <= 1e-5
        < gaussian_delta(found / 1.2, sigma / math.sqrt(rounds))
    )


def test_sampling_256_of_60000_for_60_epochs_at_noise_1_1():
    pytest.importorskip("dp_accounting")
    found = epsilon(1.1, participation=256 / 60_000, rounds=60 * 60_000 // 256, delta=1e-5)
    assert found == pytest.approx(2.5966, abs=2e-3)  # as dp-accounting 0.6 has it


def test_fewer_rounds_fewer_participants_and_more_noise_are_more_private():
    pytest.importorskip("dp_accounting")
    usual = epsilon(2.0, 0.25, 50, 1e-5)
    assert (
        max(epsilon(2.0, 0.25, 10, 1e-5), epsilon(2.0, 0.05, 50, 1e-5), epsilon(4.0, 0.25, 50, 1e-5)) < usual
    )
    assert epsilon(2.0, 0.25, 0, 1e-5) == 0


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier: 0.0 given; must be positive; 1 is usual"),
        ({"participation": 1.5}, "participation: 1.5 given; must be above 0 and at most 1; nearest: 1"),
        ({"participation": 0.0}, "participation: 0.0 given; must be above 0 and at most 1; nearest: 1"),
        ({"rounds": -1}, "rounds: -1 given; must be at least 0; nearest: 0"),
        ({"delta": 1.0}, "delta: 1.0 given; must be above 0 and below 1; 1e-05 is usual"),
        ({"delta": float("nan")}, "delta: nan given; must be above 0 and below 1; 1e-05 is usual"),
    ],
)
def test_values_out_of_range_are_refused_in_one_line(wrong, message):
    with pytest.raises(InputError) as error:
        epsilon(**{"noise_multiplier": 1.0, "participation": 0.5, "rounds": 1, "delta": 1e-5} | wrong)
    assert str(error.value) == message


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InputError, match=r"^epsilon: .*pip install -e '\.\[privacy\]' in a clone of fcljax$"):
        epsilon(1.0, 0.5, 1, 1e-5)


def test_a_curve_over_rounds_has_the_epsilon_of_each_number_of_rounds():
    found = by_round(1.1, 0.2, [1, 3, 10], 1e-3)
    assert found == pytest.approx([epsilon(1.1, 0.2, rounds, 1e-3) for rounds in (1, 3, 10)])
    assert found == sorted(found)
