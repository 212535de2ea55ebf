"""FedCLM (a baseline of PILoRA's tables): an adapter and a linear classifier trained by FedAvg, the nearest
class mean at inference.

After the last round of a task every client sends sums of features and numbers of rows of the task's classes
under the final model. Means of old classes are not computed again: nobody has their data any more.
"""

from fcljax.federate import Kit, Survey, federate
from fcljax.learner import learner
from fcljax.methods.fedavg import NoOptions
from fcljax.methods.fedncm import class_mean_step
from fcljax.models.classifiers import linear, nearest_mean
from fcljax.types import Method


def fedclm(options: NoOptions, kit: Kit) -> Method:
    """FedCLM as a method."""
    del options
    width, setting = kit.network.width, kit.setting
    classifier = nearest_mean(width, setting.classes, inner=linear(width, setting.classes))
    survey = Survey(class_mean_step(setting.task_classes, width), "closing", kit.train.batch_size)
    return federate(
        learner(kit.network, kit.adapter, classifier), setting, kit.train, kit.terms, surveys=(survey,),
        aggregation=kit.aggregation,
    )  # fmt: skip
