"""A classifier of one learned prototype per class: distances, losses, predictions
(PILoRA, section 4.2)."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fcljax.models.heads import Reduction, cross_entropy, mask_logits

Distance = Literal["sqrt_scaled", "squared"]


def distances(
    feature: Float[Array, "batch width"],
    prototypes: Float[Array, "classes width"],
    form: Distance = "sqrt_scaled",
) -> Float[Array, "batch classes"]:
    """Compute the distances of all features to all prototypes, float32.

    Args:
      feature: f.
      prototypes: m.
      form: "squared" is ||f - m||^2 (PILoRA eq. 8 and 10); "sqrt_scaled" is ||f - m|| /
        sqrt(width) (its release), whose gradient where f = m is taken as 0.
    """
    # Not ||f||^2 + ||m||^2 - 2 f.m: its cancellation would cost most digits, and all of
    # them in bfloat16. XLA fuses the difference into the sum, so [batch, classes,
    # width] is never stored.
    difference = feature.astype(jnp.float32)[:, None] - prototypes.astype(jnp.float32)
    squared = jnp.sum(jnp.square(difference), axis=-1)
    if form == "squared":
        return squared
    # two `where`: with the outer one alone, the gradient of the root at 0 would be
    # infinity times 0
    positive = squared > jnp.finfo(squared.dtype).tiny
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squared, 1.0) / feature.shape[-1]), 0.0)


def distance_logits(
    distance: Float[Array, "batch classes"], allowed: Bool[Array, " classes"]
) -> Float[Array, "batch classes"]:
    """Return logits, highest for the nearest allowed prototype."""
    return mask_logits(-distance, allowed)


def dce_loss(
    distance: Float[Array, "batch classes"],
    label: Int[Array, " batch"],
    allowed: Bool[Array, " classes"],
    mask: Bool[Array, " batch"],
    hardness: float = 1.0,
    reduction: Reduction = "mean",
) -> Float[Array, ""]:
    """Return -log softmax(-hardness * distance)[label], distance-based cross-entropy
    (PILoRA eq. 8, 9).

    It takes the allowed classes and the examples in the mask; other prototypes get no
    gradient.
    """
    return cross_entropy(-hardness * distance, label, allowed, mask, reduction)


def class_means(
    sums: Float[Array, "classes width"], counts: Float[Array, " classes"]
) -> tuple[Float[Array, "classes width"], Bool[Array, " classes"]]:
    """Return mean features (0 without examples), and which classes have examples."""
    return sums / jnp.maximum(counts, 1)[:, None], counts > 0
