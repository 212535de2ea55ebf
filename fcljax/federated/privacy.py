"""The (epsilon, delta) guarantee of central noise on clipped uploads, by an accountant
on the host.

`aggregation.add_noise` adds the noise itself.
"""

import itertools
from collections.abc import Sequence

from fcljax.errors import InputError, install_command


def epsilon(
    noise_multiplier: float,
    participation: float,
    rounds: int,
    delta: float,
) -> float:
    """Return the epsilon of (epsilon, delta) differential privacy of one client's data
    after noisy means.

    This is the Renyi accountant of the Poisson-subsampled Gaussian mechanism (Mironov et
    al. 2019, arXiv 1908.10530; Google's dp-accounting), for data sets that differ by one
    whole client. Simulations sample a fixed number of clients without replacement, and
    divide by the number that arrived. Treating that as Poisson sampling is the usual
    approximation (McMahan et al. 2018), not a proof.

    Args:
      noise_multiplier: standard deviation of the noise on the sum of uploads, in units of
        clip_norm.
      participation: share of the clients that take part in a round, in (0, 1].
      rounds: noisy means in the whole run, over all tasks; 0 gives epsilon 0.
      delta: in (0, 1), well below 1 / clients.

    Raises:
      InputError: a value out of range, or dp-accounting is not installed.
    """
    _check("noise_multiplier", noise_multiplier, noise_multiplier > 0, "positive; 1 is usual")
    _check("participation", participation, 0 < participation <= 1, "above 0 and at most 1; nearest: 1")
    _check("rounds", rounds, rounds >= 0, "at least 0; nearest: 0")
    _check("delta", delta, 0 < delta < 1, "above 0 and below 1; 1e-05 is usual")
    # the accountant would refuse an event of 0 rounds
    if rounds == 0:
        return 0.0
    return by_round(noise_multiplier, participation, [rounds], delta)[0]


def by_round(
    noise_multiplier: float, participation: float, rounds: Sequence[int], delta: float
) -> list[float]:
    """Return `epsilon` after each of these ascending numbers of rounds."""
    try:
        # an extra: only private runs need the package
        import dp_accounting as dp
    except ImportError:
        raise InputError(
            f"epsilon: needs the package dp-accounting; install it with: {install_command('privacy')}"
        ) from None
    noisy_mean = dp.PoissonSampledDpEvent(participation, dp.GaussianDpEvent(noise_multiplier))
    accountant = dp.rdp.RdpAccountant()
    epsilons = []
    for previous, current in itertools.pairwise([0, *rounds]):
        # composed step by step: one accountant serves all points of the curve
        accountant.compose(dp.SelfComposedDpEvent(noisy_mean, current - previous))
        epsilons.append(float(accountant.get_epsilon(delta)))
    return epsilons


def _check(field: str, value: float | int, valid: bool, expected: str) -> None:
    if not valid:
        raise InputError(f"{field}: {value} given; must be {expected}")
