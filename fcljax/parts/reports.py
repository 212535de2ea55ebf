"""What clients report besides their part, in the two forms that several methods share: sums and means of
features by class."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float

from fcljax.models.prototypes import class_means
from fcljax.parts.classifiers import Sums, add_batch, empty_sums
from fcljax.parts.federate import Collect, Seen
from fcljax.parts.learner import Learner
from fcljax.types import ClientContext, View


class Prototypes(NamedTuple):
    """Class prototypes, one row per class of some list of classes, and which of them exist."""

    vector: Float[Array, "*clients classes width"]
    present: Bool[Array, "*clients classes"]


def class_sums(classes: int, width: int, view: View | None = None) -> Collect:
    """Sums of features and numbers of rows of the task's classes [Ct], to be added up.

    Args:
      classes: Ct.
      width: of the features.
      view: of the pass; None: at every step of training, or a survey's usual pass.
    """
    return Collect("class_sums", lambda context: empty_sums(classes, width), _look, view=view, channel="sum")


def class_prototypes(name: str, classes: int, width: int, view: View | None) -> Collect:
    """The mean features of each of the task's classes [Ct], one set per client; arguments as `class_sums`."""

    def close(context: ClientContext, total: Sums) -> Prototypes:
        del context
        return Prototypes(*class_means(total.feature, total.rows))

    return Collect(name, lambda context: empty_sums(classes, width), _look, close, view)


def _look(learner: Learner, seen: Seen, total: Sums) -> Sums:
    del learner
    return add_batch(total, seen.output.feature, seen.batch, seen.context.task)
