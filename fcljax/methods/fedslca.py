"""FedSLCA: SLCA (Zhang et al., ICCV 2023, arXiv 2303.05118) in a federation, a baseline
of FPPL's tables.

    client     trains the whole network slowly (1e-4) and the classifier faster (1e-2): the slow
               learner
    server     averages
    task end   clients send, for each class of the task, the sums of their features and of the
               features' outer products under the final model, which give the mean and the
               covariance of all examples
    server     from the second task on, aligns a copy of the classifier on features drawn from
               the Gaussians of all classes so far, by cross-entropy on normalised logits; the
               copy predicts, and the next task continues from the clients' classifier

SLCA is a method for one learner, and FPPL's FedSLCA was not released: that the server
aligns, and that sums travel, is our choice. The parameters that travel are those of
FPPL's table I.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fcljax.adapters.full import FullOptions
from fcljax.models.heads import Head, apply_head
from fcljax.models.products import exact_matmul
from fcljax.options import option
from fcljax.parts.class_gaussians import (
    DrawnTraining,
    Gaussians,
    class_statistics,
    merge_gaussians,
    no_gaussians,
    train_on_draws,
)
from fcljax.parts.classifiers import computed, linear_on
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import Classifier, Params, cross_entropy_loss, learner
from fcljax.parts.reports import longest_feature
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, RunConfig
from fcljax.types import Method, Task

# share by which old means are shrunk at most: the first task's after many tasks (release)
SHRINKAGE = 0.1


@dataclasses.dataclass(frozen=True)
class FedSLCAOptions:
    """Options of FedSLCA's classifier alignment; the values are those of SLCA's
    release."""

    align_epochs: int = 5
    """Number of server epochs over drawn features, with equally many features of every
    class."""
    align_samples: int = 256
    """Number of features drawn per class in an epoch; also the batch size."""
    align_lr: float = option(0.01, positive=True)
    """Learning rate of the alignment; its cosine schedule ends at 0."""
    align_decay: float = 5e-4
    """Weight decay of the alignment."""
    logit_norm: float = option(0.1, positive=True)
    """Temperature of the normalised logits."""


# the slow learner of FPPL's section V-A
PRESETS = {"intended": Preset(FedSLCAOptions(), RunConfig(lr=1e-2), (FullOptions(full_lr=1e-4),))}


class Aligned(NamedTuple):
    """The parameters of the classifier."""

    inner: Head
    """The one that clients train."""
    aligned: Head
    """The server's aligned copy."""
    task: Int[Array, ""]
    """The task at whose end it was aligned; -1: none yet."""


def fedslca(options: FedSLCAOptions, run: Run) -> Method:
    """Compose FedSLCA."""
    classes = run.sizes.classes
    inner = linear_on(run.adapter, run.network.width, classes)
    model = learner(run.network, run.adapter, aligned_classifier(inner, classes))
    server_rules = (alignment(options, run),)
    return federate(run, model, loss=cross_entropy_loss(), server_rules=server_rules)


def aligned_classifier(inner: Classifier, classes: int) -> Classifier:
    """Train `inner`, and predict with the aligned copy once the task is over."""

    def init(_key: PRNGKeyArray, head: Head) -> Aligned:
        return Aligned(head, head, jnp.int32(-1))

    def predict(params: Aligned, feature: Array, task: Task) -> Array:
        # until the task ends, the aligned copy does not know its classes
        is_over = params.task == task.index
        aligned = apply_head(params.aligned, feature)
        return jnp.where(is_over, aligned, apply_head(params.inner, feature))

    return computed(classes, init, predict, inner)


# ---- classifier alignment --------------------------------------------------------------


def alignment(options: FedSLCAOptions, run: Run) -> ServerRule:
    """Keep the Gaussians of all classes, and align a copy of the classifier."""
    width = run.network.width
    classes = run.sizes.classes

    def init(_params: Params, _trainable: Params) -> Gaussians:
        return no_gaussians(width, classes)

    def update(round: ServerRound, params: Params, gaussians: Gaussians) -> ServerUpdate:
        gaussians = merge_gaussians(gaussians, round.reports["statistics"], round.task)
        head = params.classifier.inner
        task = round.task.index

        def align() -> Head:
            tasks = run.sizes.tasks
            return align_classifier(options, head, gaussians, task, tasks, round.key)

        # the release aligns from the second task on
        aligned = jax.lax.cond(task > 0, align, lambda: head)
        classifier = Aligned(head, aligned, task)
        return ServerUpdate(params._replace(classifier=classifier), gaussians)

    longest = functools.partial(longest_feature, run)
    report = class_statistics(width, run.sizes.task_classes, longest)
    return ServerRule("alignment", update, init, reports=(report,), when="task_end")


def align_classifier(
    options: FedSLCAOptions,
    head: Head,
    gaussians: Gaussians,
    task: Int[Array, ""],
    tasks: int,
    key: PRNGKeyArray,
) -> Head:
    """Train the classifier on features drawn from all classes so far.

    Args:
      options: epochs, learning rate, temperature.
      head: the clients' classifier.
      gaussians: of all classes.
      task: number of the task, for the shrinkage of old means.
      tasks: T.
      key: features are drawn anew in each epoch.
    """
    training = DrawnTraining(
        options.align_epochs, options.align_samples, options.align_lr, options.align_decay
    )

    def logits(head: Head, feature: Array) -> Array:
        return normalised(apply_head(head, feature), gaussians, tasks, options.logit_norm)

    return train_on_draws(training, head, shrunk(gaussians, task), logits, key)


def shrunk(gaussians: Gaussians, task: Int[Array, ""]) -> Gaussians:
    """Return the Gaussians with the means of old classes shrunk, as in the release: in task
    T those of task t by 1 - SHRINKAGE + SHRINKAGE (t + 1) / (T + 1)."""
    shrink = 1 - SHRINKAGE + SHRINKAGE * (gaussians.task + 1) / (task + 1)
    return gaussians._replace(mean=shrink[:, None] * gaussians.mean)


def normalised(
    logits: Float[Array, "batch C"], gaussians: Gaussians, tasks: int, temperature: float
) -> Float[Array, "batch C"]:
    """Return logits divided by their length and a temperature.

    The length is the mean over the tasks so far of the length of each task's logits, as
    in SLCA's release. Classes without examples get the lowest finite value.
    """
    # [C, T]: which classes belong to which task; absent classes to none
    member = jax.nn.one_hot(gaussians.task, tasks) * gaussians.present[:, None]
    has_classes = jnp.any(member > 0, axis=0)
    # the gradient of the root at 0 is infinite
    squares = jnp.maximum(exact_matmul(logits**2, member), 1e-14)
    lengths = jnp.where(has_classes, jnp.sqrt(squares), 0.0)
    mean_length = jnp.sum(lengths, -1) / jnp.maximum(jnp.sum(has_classes), 1)
    scaled = logits / (temperature * mean_length[:, None])
    return jnp.where(gaussians.present, scaled, jnp.finfo(logits.dtype).min)
