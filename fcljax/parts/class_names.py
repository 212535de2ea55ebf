"""Classifiers made of class names: features of CLIP's image side beside those of its text
side (Radford et al. 2021).

    logit_c(x) = s cos(W_i f(x), t_c)        t_c: the text feature of class c's prompt

They predict classes of later tasks too.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from fcljax.errors import InputError
from fcljax.models.clip import LEAST_NORM, ClassTexts, image_features
from fcljax.models.heads import Head, apply_head, unit
from fcljax.models.products import exact_matmul
from fcljax.parts.classifiers import no_logits
from fcljax.parts.federate import Run
from fcljax.parts.learner import Classifier, Learner, Logits, Output, Params, learner
from fcljax.types import Batch, Frozen, Task, TextTower


@runtime_checkable
class InitClassifier(Protocol):
    """Returns the trainable parameters of the classifier."""

    def __call__(self, key: PRNGKeyArray, texts: ClassTexts, /) -> Any: ...


@runtime_checkable
class TextLogits(Protocol):
    """Returns the logits of all classes by image features of length 1.

    `competing` are the classes among which an example is classified.
    """

    def __call__(
        self,
        texts: ClassTexts,
        trainable: Any,
        feature: Float[Array, "batch E"],
        competing: Bool[Array, " C"],
        /,
    ) -> Logits: ...


class NamedClassifier(NamedTuple):
    """A classifier made of class names."""

    init: InitClassifier
    """init(key, texts) -> trainable parameters."""
    logits: TextLogits
    """logits(texts, trainable, feature, competing) -> [batch, C]."""


def text_side(run: Run, method: str) -> TextTower:
    """Return the text side of the run's network.

    Raises:
      InputError: if it has none.
    """
    if run.network.text is None:
        raise InputError(
            f"class_prompts: {method} needs prompts of the classes, for CLIP's text tower; nearest: "
            "'a photo of a {}'"
        )
    return run.network.text


def named_learner(run: Run, classifier: NamedClassifier) -> Learner:
    """Return the run's network and adapter with a classifier made of class names."""

    def no_parameters(_key: PRNGKeyArray) -> tuple:
        return ()

    # a `Classifier` sees neither the frozen texts nor which classes compete, so the
    # composed learner gives features, and logits are computed from them below
    no_classifier = Classifier(no_parameters, no_logits(run.sizes.classes))
    inner = learner(run.network, run.adapter, no_classifier)

    def init(key: PRNGKeyArray, frozen: Frozen) -> Params:
        return inner.init(key, frozen)._replace(classifier=classifier.init(key, frozen.text))

    def forward(
        frozen: Frozen, cached: Params, trainable: Params, batch: Batch, task: Task, train: bool
    ) -> Output:
        output = inner.forward(frozen, cached, trainable, batch, task, train)
        feature = image_features(frozen.text, output.feature)
        # clients train among the task's classes; evaluation is among all seen so far
        competing = task.current if train else task.seen
        logits = classifier.logits(frozen.text, trainable.classifier, feature, competing)
        return output._replace(logits=logits, feature=feature)

    def predict(frozen: Frozen, params: Params, batch: Batch, task: Task) -> Logits:
        return forward(frozen, params, inner.trainable(params, task), batch, task, False).logits

    return inner._replace(init=init, forward=forward, predict=predict, names_classes=True)


def text_rows() -> NamedClassifier:
    """Return CLIP's zero-shot classifier: the text features of the classes' prompts."""

    def init(_key: PRNGKeyArray, _texts: ClassTexts) -> tuple:
        return ()

    def logits(texts: ClassTexts, _trainable: tuple, feature: Array, _competing: Array) -> Logits:
        return texts.scale * exact_matmul(feature, texts.rows.T)

    return NamedClassifier(init, logits)


def linear_from_text() -> NamedClassifier:
    """Return a linear classifier that begins as the zero-shot one, and all of which trains.

    Its weights are s t_c, and its biases 0 (Wortsman et al. 2022).
    """

    def init(_key: PRNGKeyArray, texts: ClassTexts) -> Head:
        # the scale s is part of the weights, so that it trains with them
        return Head(texts.scale * texts.rows.T, jnp.zeros(len(texts.rows)))

    def logits(_texts: ClassTexts, trainable: Head, feature: Array, _competing: Array) -> Logits:
        return apply_head(trainable, feature)

    return NamedClassifier(init, logits)


@runtime_checkable
class Context(Protocol):
    """Returns the context vectors of all prompts, [M, token width]."""

    def __call__(
        self,
        trainable: Any,
        texts: ClassTexts,
        competing: Bool[Array, " C"],
        /,
    ) -> Array: ...


def behind_context(tower: TextTower, init: InitClassifier, context: Context) -> NamedClassifier:
    """Return a classifier whose class prompts begin with trained context vectors.

    Args:
      tower: the text side.
      init: draws the trainable parameters.
      context: makes the context vectors from them.
    """

    def logits(texts: ClassTexts, trainable: PyTree, feature: Array, competing: Array) -> Logits:
        # cosine similarities; LEAST_NORM keeps the division finite
        rows = unit(tower.features(texts, context(trainable, texts, competing)), LEAST_NORM)
        return texts.scale * exact_matmul(feature, rows.T)

    return NamedClassifier(init, logits)
