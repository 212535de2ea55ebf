"""Presets that HePCo (Halbe et al. 2024, section 4.1) and its baselines share."""

import dataclasses

from fcljax.adapters.full import FullOptions
from fcljax.data.sampled import Sampled
from fcljax.settings import NoOptions, Preset, RunConfig, with_changes, with_mini

# clients exist for one round and are averaged without weights; their learning rate falls
# over the epochs of the round
_RUN = RunConfig(partition="sampled", aggregator="uniform", lr_schedule="epoch_cosine")
# the paper does not state a schedule: this is the release's, which lags by an epoch
_PAPER = dataclasses.replace(_RUN, lr_schedule="epoch_cosine_lag")
_RELEASED = dataclasses.replace(
    _PAPER, preprocess="hepco", class_order="python", partition=Sampled(long_tail="reported")
)
CLIENT = with_mini(
    {
        "intended": Preset(NoOptions(), _RUN),
        "paper": Preset(NoOptions(), _PAPER),
        "released": Preset(NoOptions(), _RELEASED),
    },
    lr=1e-2,
)
# baselines that train the whole network have learning rates of their own (section 5)
_WHOLE = with_changes(CLIENT, adapters=(FullOptions(full_lr=5e-5),), lr=5e-5)
WHOLE = with_mini(_WHOLE, lr=5e-3, full_lr=5e-4)
