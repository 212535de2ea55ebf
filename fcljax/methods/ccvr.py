"""CCVR: classifier calibration with virtual representations (Luo et al., NeurIPS 2021, arXiv
2106.05001), after every task of a stream.

    rounds      as FedAvg
    task end    client k sends sums over its features z of each class c under the final model,
                which give N_ck, the mean mu_ck and the covariance S_ck
    server      merges them,
                    mu_c = sum_k N_ck mu_ck / N_c
                    S_c  = sum_k ((N_ck - 1) S_ck + N_ck mu_ck mu_ck^T) / (N_c - 1)
                           - N_c mu_c mu_c^T / (N_c - 1)
                draws virtual features from N(mu_c, S_c) of every class so far, and trains the
                classifier on them by cross-entropy; the next task continues from it

mu_c and S_c are mean and covariance of all examples, so that they do not depend on the
partition; the server computes them from the sums. The paper has one task. Here Gaussians
of old classes are kept, and their features are those of an older network where the adapter
trains.
"""

import dataclasses
import functools

from jaxtyping import Array

from fcljax.adapters.lora import LoraOptions
from fcljax.models.heads import Head, apply_head, mask_logits
from fcljax.options import option
from fcljax.parts.class_gaussians import (
    DrawnTraining,
    Gaussians,
    class_statistics,
    merge_gaussians,
    no_gaussians,
    train_on_draws,
)
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Params, cross_entropy_loss
from fcljax.parts.reports import longest_feature
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, with_mini
from fcljax.types import Method


@dataclasses.dataclass(frozen=True)
class CCVROptions:
    """Options of the classifier's calibration; the values are those of fed-mammoth."""

    calibration_epochs: int = 5
    """Number of server epochs over drawn features, with equally many features of every
    class."""
    virtual_features: int = 256
    """Number of features drawn per class in an epoch; also the batch size."""
    calibration_lr: float = option(0.01, positive=True)
    """Learning rate of the calibration; its cosine schedule ends at 0."""


_LORA = LoraOptions(lora_pairs="one")
PRESETS = with_mini({"intended": Preset(CCVROptions(), adapters=(_LORA,))}, lora_lr=1e-3)


def ccvr(options: CCVROptions, run: Run) -> Method:
    """Compose CCVR."""
    rules = (calibration(options, run),)
    return federate(run, linear_learner(run), loss=cross_entropy_loss(), server_rules=rules)


def calibration(options: CCVROptions, run: Run) -> ServerRule:
    """Keep the Gaussians of all classes, and train the classifier on features drawn from them."""
    width = run.network.width
    training = DrawnTraining(options.calibration_epochs, options.virtual_features, options.calibration_lr)

    def init(_params: Params, _trainable: Params) -> Gaussians:
        return no_gaussians(width, run.sizes.classes)

    def update(round: ServerRound, params: Params, gaussians: Gaussians) -> ServerUpdate:
        gaussians = merge_gaussians(gaussians, round.reports["statistics"], round.task)

        # no class without features to draw may compete
        def logits(head: Head, feature: Array) -> Array:
            return mask_logits(apply_head(head, feature), gaussians.present)

        head = train_on_draws(training, params.classifier, gaussians, logits, round.key)
        return ServerUpdate(params._replace(classifier=head), gaussians)

    longest = functools.partial(longest_feature, run)
    report = class_statistics(width, run.sizes.task_classes, longest)
    return ServerRule("calibration", update, init, reports=(report,), when="task_end")
