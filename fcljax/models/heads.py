"""Linear classifiers and masked losses: all classes are preallocated, and masks say which
compete."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Num, PRNGKeyArray

from fcljax.models.products import exact_matmul

Reduction = Literal["mean", "sum"]


class Head(NamedTuple):
    """A linear classifier over all classes of the stream."""

    kernel: Float[Array, "width classes"]
    bias: Float[Array, " classes"]


def init_head(key: PRNGKeyArray, width: int, classes: int) -> Head:
    """Draw kernel and bias uniformly in +-1/sqrt(width), as torch's Linear does."""
    bound = width**-0.5
    kernel, bias = jax.random.split(key)
    return Head(
        jax.random.uniform(kernel, (width, classes), minval=-bound, maxval=bound),
        jax.random.uniform(bias, (classes,), minval=-bound, maxval=bound),
    )


def init_truncated(key: PRNGKeyArray, width: int, classes: int) -> Head:
    """Draw a kernel of deviation 0.02, truncated at two of them (timm's heads)."""
    kernel = 0.02 * jax.random.truncated_normal(key, -2.0, 2.0, (width, classes))
    return Head(kernel, jnp.zeros(classes))


def apply_head(
    head: Head,
    feature: Float[Array, "batch width"],
) -> Float[Array, "batch classes"]:
    """Return the logits of all classes."""
    # in float32, because in bfloat16 the logits of many classes would be equal
    return exact_matmul(feature, head.kernel) + head.bias


def mask_logits(
    logits: Float[Array, "*batch classes"], allowed: Bool[Array, "*allowed"]
) -> Float[Array, "*batch classes"]:
    """Set the logits of classes that are not allowed to the lowest finite value. They
    never win and get a gradient of exactly 0."""
    # -inf would do the same, but turns into nan where no class is allowed
    return jnp.where(allowed, logits, jnp.finfo(logits.dtype).min)


def masked_sum(
    value: Float[Array, " batch"],
    mask: Bool[Array, " batch"],
) -> Float[Array, ""]:
    """Sum over the mask's examples; others, even nan, add no value or gradient."""
    return jnp.sum(jnp.where(mask, value, 0.0))


def reduce_rows(
    value: Float[Array, " batch"],
    mask: Bool[Array, " batch"],
    count: Num[Array, ""],
    reduction: Reduction,
) -> Float[Array, ""]:
    """Sum over the examples in the mask; "mean" divides it by `count`, or by 1 if that is
    0."""
    total = masked_sum(value, mask)
    if reduction == "sum":
        return total
    return total / jnp.maximum(count, 1)


def cross_entropy(
    logits: Float[Array, "batch classes"],
    label: Int[Array, " batch"],
    allowed: Bool[Array, " classes"],
    mask: Bool[Array, " batch"],
    reduction: Reduction = "mean",
) -> Float[Array, ""]:
    """Return the cross-entropy over the allowed classes and the examples in the mask.

    Other classes get no gradient.
    """
    # padding has label 0, which may be excluded: its loss is large but finite, and masked
    loss = optax.softmax_cross_entropy_with_integer_labels(mask_logits(logits, allowed), label)
    return reduce_rows(loss, mask, jnp.sum(mask), reduction)


def correct(
    logits: Float[Array, "batch classes"],
    label: Int[Array, " batch"],
    allowed: Bool[Array, " classes"],
    mask: Bool[Array, " batch"],
) -> Float[Array, ""]:
    """Count the examples in the mask whose highest allowed logit is their label's."""
    prediction = jnp.argmax(mask_logits(logits, allowed), axis=-1)
    return masked_sum((prediction == label).astype(jnp.float32), mask)


def distillation(
    student: Float[Array, "batch classes"],
    teacher: Float[Array, "batch classes"],
    allowed: Bool[Array, " classes"],
    mask: Bool[Array, " batch"],
    temperature: float = 2.0,
) -> Float[Array, ""]:
    """Return the loss of knowledge distillation over the allowed classes.

    It is the mean, over the examples in the mask, of the cross-entropy between
    softmax(teacher / T) and softmax(student / T), without the factor T^2 (LwF as in
    TARGET's release). 0 if no class or example is left.
    """
    # even where student and teacher share parameters, no gradient reaches the teacher
    target = jax.nn.softmax(mask_logits(jax.lax.stop_gradient(teacher) / temperature, allowed))
    log_probability = jax.nn.log_softmax(mask_logits(student / temperature, allowed))
    # For excluded classes the product is 0 times the lowest finite number: 0, but with a
    # gradient that is not finite. So `where` leaves them out.
    loss = -jnp.sum(jnp.where(allowed, target * log_probability, 0.0), axis=-1)
    return reduce_rows(loss, mask, jnp.sum(mask), "mean")


def kl(
    p: Float[Array, "*p classes"],
    q: Float[Array, "*q classes"],
    allowed: Bool[Array, "*r classes"],
) -> Float[Array, "*broadcast"]:
    """Return KL(softmax(p) || softmax(q)) of logits over the allowed classes."""

    def log_probability(logits: Array) -> Array:
        # 0 for excluded classes: log p - log q is 0 there, and not inf - inf
        return jnp.where(allowed, jax.nn.log_softmax(mask_logits(logits, allowed)), 0.0)

    log_p = log_probability(p)
    log_q = log_probability(q)
    return jnp.sum(jnp.where(allowed, jnp.exp(log_p) * (log_p - log_q), 0.0), axis=-1)


def unit(
    x: Float[Array, "*rows width"],
    eps: float = 1e-8,
) -> Float[Array, "*rows width"]:
    """Scale vectors to length 1; one shorter than eps stays shorter."""
    squared_norm = jnp.sum(x * x, axis=-1, keepdims=True)
    # with the guard outside the root, the gradient at 0 would be 0 times infinity
    return x * jax.lax.rsqrt(jnp.maximum(squared_norm, eps**2))


def cosine(
    a: Float[Array, "n width"],
    b: Float[Array, "m width"],
    eps: float = 1e-8,
) -> Float[Array, "n m"]:
    """Return the cosine similarity of all pairs; a vector shorter than eps counts as
    0."""
    return exact_matmul(unit(a, eps), unit(b, eps).T)


def sum_by_class(
    feature: Float[Array, "batch width"],
    label: Int[Array, " batch"],
    classes: Int[Array, " Ct"],
    mask: Bool[Array, " batch"],
) -> tuple[Float[Array, "Ct width"], Float[Array, " Ct"]]:
    """Return the sum of features and the number of examples of each class."""
    # a matrix product, because scatter-add is not deterministic on GPUs
    one_hot = ((label[:, None] == classes) & mask[:, None]).astype(jnp.float32)
    masked_feature = jnp.where(mask[:, None], feature, 0.0).astype(jnp.float32)
    return exact_matmul(one_hot.T, masked_feature), jnp.sum(one_hot, axis=0)
