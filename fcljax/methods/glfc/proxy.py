"""The proxy server of GLFC and LGA, which chooses the models that clients distil.

When clients meet a new task they send gradients of prototype images. The proxy infers
their labels, reconstructs the images by matching gradients, and from then on evaluates
each merged model on them. It sends two models: the best one since these gradients came,
and the best one before.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.federated.sums import one_of
from fcljax.methods.glfc.lenet import LeNet, gradient_of, init_lenet, label_of
from fcljax.options import option
from fcljax.parts.client import Report
from fcljax.parts.federate import Run
from fcljax.parts.learner import Learner, Params
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.parts.task_start import unlabelled
from fcljax.pixels import jitter
from fcljax.types import Network, Task, Weighted

REPORT = "gradients"  # name of the clients' report
LINE_SEARCH = 10  # most evaluations in a step of L-BFGS


@dataclasses.dataclass(frozen=True)
class ProxyOptions:
    """Options of prototypes and of the proxy's evaluation."""

    prototype_steps: int = option(50, least=0)
    """Number of gradient steps that perturb a prototype."""
    prototype_lr: float = option(0.2, positive=True)
    """Learning rate of these steps."""
    prototype_decay: float = 1e-5
    """Weight decay of these steps."""
    gradient_side: int = 32
    """Side in pixels at which prototypes are sent and rebuilt; larger images are resized
    to it."""
    match_steps: int = 100
    """Number of L-BFGS steps that reconstruct an image (release: 250 of 20 each)."""
    match_start: Literal["grey", "normal"] = "grey"
    """Noise from which an image is reconstructed: a tenth around grey, or standard
    normal."""
    monitor_images: int = 4
    """Number of last states of each reconstructed image that models must predict."""
    monitor_padding: float = option(0.125, most=1.0)
    """Padding of these images before a crop, as a fraction of the side."""
    reset_best: Literal["arrival", "second", "never"] = "arrival"
    """When the best score is reset: with new gradients (arrival), with the second task,
    or never."""


class Gradients(NamedTuple):
    """A client's report on its prototypes."""

    gradient: LeNet
    """Of each of the task's classes: leaves [Ct, ...]."""
    present: Bool[Array, "*clients Ct"]
    """Classes of which it has a prototype."""
    spread: Float[Array, "*clients"]
    """The mean variance of an entry of its features within a class."""


class OldModel(NamedTuple):
    """A model that can be distilled."""

    trainable: Params
    task: Task
    """The task in which it was merged; index -1: there is no model."""


class BestModels(NamedTuple):
    """The models that clients may distil."""

    previous: OldModel
    """The best one from before the newest gradients."""
    current: OldModel
    """The best one since."""


class Monitor(NamedTuple):
    """The reconstructed images on which models are evaluated."""

    image: Float[Array, "clients Ct states h w 3"]
    """Pixels in [0, 1]: some last states of each image."""
    label: Int[Array, "clients Ct"]
    """Inferred labels."""
    used: Bool[Array, "clients Ct"]
    """Entries that hold images."""


class Proxy(NamedTuple):
    """The state of the proxy."""

    models: BestModels
    monitor: Monitor
    best: Float[Array, ""]
    """The best score since its last reset."""
    radius: Float[Array, ""]
    """Standard deviation of features in the first task."""


@runtime_checkable
class Evaluate(Protocol):
    """Returns the share of the proxy's images that a model predicts correctly."""

    def __call__(
        self, round: ServerRound, params: Params, proxy: Proxy, key: PRNGKeyArray, /
    ) -> Float[Array, ""]: ...


# ---- what clients send -----------------------------------------------------------------


def side_of(options: ProxyOptions, network: Network) -> tuple[int, int]:
    """Return the height and width at which prototypes are sent."""
    height, width, _ = network.image
    return min(height, options.gradient_side), min(width, options.gradient_side)


def shared_lenet(options: ProxyOptions, network: Network, classes: int) -> LeNet:
    """Return the network whose gradients encode images."""
    # a constant key: clients and proxy need the same network
    return init_lenet(jax.random.key(0), *side_of(options, network), classes)


def encode(
    options: ProxyOptions,
    network: Network,
    classes: int,
    pixels: Float[Array, "Ct h w 3"],
    label: Int[Array, " Ct"],
) -> LeNet:
    """Return the gradient of each image under the shared network."""
    params = shared_lenet(options, network, classes)
    small = resize(pixels, *side_of(options, network))
    return jax.vmap(gradient_of, (None, 0, 0))(params, small, jax.nn.one_hot(label, classes))


def resize(pixels: Float[Array, "n h w 3"], height: int, width: int) -> Float[Array, "n h2 w2 3"]:
    """Resize images bilinearly; images of this size are returned as they are."""
    if pixels.shape[1:3] == (height, width):
        return pixels
    return jax.image.resize(pixels, (len(pixels), height, width, 3), "bilinear")


# ---- the server rule -------------------------------------------------------------------


def proxy_server(
    options: ProxyOptions,
    run: Run,
    evaluate: Evaluate,
    gradients: Report,
) -> ServerRule:
    """Reconstruct images, evaluate the merged model on them, and send the best models.

    Args:
      options: of the method.
      run: for sizes and the network.
      evaluate: scores a model.
      gradients: the clients' report.
    """

    def init(_params: Params, trainable: Params) -> Proxy:
        return _new_proxy(options, run, trainable)

    def update(round: ServerRound, params: Params, proxy: Proxy) -> ServerUpdate:
        reported: Gradients = round.reports[REPORT]
        keys = jax.random.split(round.key)
        present = reported.present & round.valid[:, None]
        any_gradient = jnp.any(present)
        # `cond`: thousands of L-BFGS steps run only in rounds with gradients
        reconstruct = functools.partial(_with_new_images, options, run, round, reported, present, keys[0])
        proxy = jax.lax.cond(any_gradient, reconstruct, lambda proxy: proxy, proxy)

        resets = {
            "arrival": any_gradient,
            "second": (round.task.index == 1) & (round.index == 0),
            "never": jnp.bool_(False),
        }
        best = jnp.where(resets[options.reset_best], 0.0, proxy.best)
        score = evaluate(round, params, proxy, keys[1])
        merged = _merged_model(round, params)
        # `>=`, as in the release: of equal scores the newer model counts
        current = one_of(score >= best, merged, proxy.models.current)
        models = proxy.models._replace(current=current)
        proxy = proxy._replace(models=models, best=jnp.maximum(score, best))

        senders = jnp.sum(jnp.any(present, axis=1)).astype(jnp.float32)
        one_round = jnp.ones(())
        metrics = {"score": Weighted(score, one_round), "senders": Weighted(senders, one_round)}
        return ServerUpdate(params, proxy, metrics)

    def sends(_task: Task, proxy: Proxy) -> BestModels:
        return proxy.models

    return ServerRule("proxy", update, init, sends, reports=(gradients,))


def _new_proxy(options: ProxyOptions, run: Run, trainable: Params) -> Proxy:
    """Return the state before the first task."""
    sizes = run.sizes
    no_classes = jnp.zeros(sizes.classes, bool)
    task_classes = jnp.full(sizes.task_classes, -1, jnp.int32)
    no_task = Task(jnp.int32(-1), task_classes, no_classes, no_classes)
    no_model = OldModel(trainable._replace(extra={}), no_task)
    shape = (sizes.clients, sizes.task_classes)
    image = jnp.zeros((*shape, options.monitor_images, *side_of(options, run.network), 3))
    monitor = Monitor(image, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))
    # the radius that LGA's release has until the first task's gradients come
    radius = jnp.float32(0.15)
    return Proxy(BestModels(no_model, no_model), monitor, jnp.zeros(()), radius)


def _merged_model(round: ServerRound, params: Params) -> OldModel:
    # in the types of the state, whose task came from Python numbers
    task = jax.tree.map(jnp.asarray, round.task)
    task = task._replace(index=task.index.astype(jnp.int32), classes=task.classes.astype(jnp.int32))
    return OldModel(round.learner.trainable(params, round.task), task)


def _with_new_images(
    options: ProxyOptions,
    run: Run,
    round: ServerRound,
    reported: Gradients,
    present: Bool[Array, "P Ct"],
    key: PRNGKeyArray,
    proxy: Proxy,
) -> Proxy:
    """Replace all images by new ones; the best model so far becomes the previous one."""
    # one client after the other: each reconstruction has an L-BFGS state of its own
    keys = jax.random.split(key, len(present))
    label = label_of(reported.gradient)
    lenet = shared_lenet(options, run.network, run.sizes.classes)
    side = side_of(options, run.network)
    of_client = functools.partial(_reconstruct_client, options, lenet, side)
    arguments = (keys, reported.gradient, label, present)
    image = jax.lax.map(lambda client: of_client(*client), arguments)

    def pad(buffer: Array, new: Array) -> Array:
        return jnp.zeros_like(buffer).at[: len(new)].set(new)

    monitor = jax.tree.map(pad, proxy.monitor, Monitor(image, label, present))
    senders = jnp.any(present, axis=1)
    total = jnp.sum(jnp.where(senders, reported.spread, 0.0))
    spread = total / jnp.maximum(jnp.sum(senders), 1)
    radius = jnp.where(round.task.index == 0, jnp.sqrt(spread), proxy.radius)
    models = BestModels(proxy.models.current, proxy.models.current)
    return proxy._replace(models=models, monitor=monitor, radius=radius)


def _reconstruct_client(
    options: ProxyOptions,
    lenet: LeNet,
    side: tuple[int, int],
    key: PRNGKeyArray,
    gradient: LeNet,
    label: Int[Array, " Ct"],
    present: Bool[Array, " Ct"],
) -> Float[Array, "Ct states h w 3"]:
    """Return the images of one client's gradients, zeros where it sent none."""
    no_image = jnp.zeros((options.monitor_images, *side, 3))

    def of_class(arguments: tuple) -> Float[Array, "states h w 3"]:
        key, gradient, label, present = arguments
        match = functools.partial(match_gradient, options, lenet, side, key, gradient, label)
        return jax.lax.cond(present, match, lambda: no_image)

    keys = jax.random.split(key, len(present))
    return jax.lax.map(of_class, (keys, gradient, label, present))


def match_gradient(
    options: ProxyOptions,
    lenet: LeNet,
    side: tuple[int, int],
    key: PRNGKeyArray,
    gradient: LeNet,
    label: Int[Array, ""],
) -> Float[Array, "states h w 3"]:
    """Return the last states of an image whose gradient L-BFGS brings to this one.

    This is deep leakage from gradients (Zhu et al. 2019).

    Args:
      options: steps, start and number of states.
      lenet: the shared network.
      side: height and width of the image.
      key: of the start.
      gradient: of an unknown image.
      label: its class.

    Returns:
      Pixels in [0, 1].
    """
    target = jax.nn.one_hot(label, gradient.bias.shape[-1])

    def distance(image: Float[Array, "h w 3"]) -> Float[Array, ""]:
        difference = jax.tree.map(jnp.subtract, gradient_of(lenet, image, target), gradient)
        return optax.tree.norm(difference, squared=True)

    start = jax.random.normal(key, (*side, 3))
    # nearer to an image's pixels in [0, 1], so fewer steps suffice
    if options.match_start == "grey":
        start = 0.5 + 0.1 * start
    states = options.monitor_images
    lbfgs = optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(LINE_SEARCH))

    def step(i: Array, carry: tuple) -> tuple:
        image, optimiser, images = carry
        value, gradient = jax.value_and_grad(distance)(image)
        update, optimiser = lbfgs.update(
            gradient, optimiser, image, value=value, grad=gradient, value_fn=distance
        )
        image = optax.apply_updates(image, update)
        # a ring buffer of the last states
        return image, optimiser, images.at[i % states].set(image)

    images = jnp.broadcast_to(start, (states, *start.shape))
    carry = (start, lbfgs.init(start), images)
    _, _, images = jax.lax.fori_loop(0, options.match_steps, step, carry)
    return jnp.clip(images, 0.0, 1.0)


# ---- evaluation of a model -------------------------------------------------------------


def training_view(
    options: ProxyOptions, learner: Learner, monitor: Monitor, key: PRNGKeyArray
) -> Float[Array, "clients Ct states h w 3"]:
    """Return the images cropped and mirrored at the network's size, pixels in [0, 1]."""
    height, width, _ = learner.network.image
    image = monitor.image.reshape(-1, *monitor.image.shape[3:])
    image = jitter(key, resize(image, height, width), options.monitor_padding)
    return image.reshape(*monitor.image.shape[:3], height, width, 3)


def accuracy(
    options: ProxyOptions,
    round: ServerRound,
    params: Params,
    proxy: Proxy,
    key: PRNGKeyArray,
) -> Float[Array, ""]:
    """Return GLFC's score: the accuracy on the images among seen classes; 0 if none."""
    learner = round.learner
    task = round.task
    monitor = proxy.monitor
    trainable = learner.trainable(params, task)

    def of_entry(pixels: Float[Array, "states h w 3"], label: Array) -> Float[Array, ""]:
        batch = unlabelled(learner, pixels)
        output = learner.forward(round.frozen, params, trainable, batch, task, False)
        prediction = jnp.argmax(jnp.where(task.seen, output.logits, -jnp.inf), axis=-1)
        return jnp.mean(prediction == label)

    image = training_view(options, learner, monitor, key)
    return mean_over_used(of_entry, image.reshape(-1, *image.shape[2:]), monitor)


def mean_over_used(
    score: Callable[[PyTree, Array], Float[Array, ""]], entries: PyTree, monitor: Monitor
) -> Float[Array, ""]:
    """Return the mean score over the used entries; nothing is computed for the others.

    Args:
      score: score(entry, label).
      entries: leaves [clients * Ct, ...].
      monitor: which entries are used, and their labels.
    """
    used = monitor.used.reshape(-1)

    def of_entry(arguments: tuple) -> Float[Array, ""]:
        entry, label, used = arguments

        def compute() -> Float[Array, ""]:
            return jnp.asarray(score(entry, label), jnp.float32)

        return jax.lax.cond(used, compute, lambda: jnp.zeros(()))

    scores = jax.lax.map(of_entry, (entries, monitor.label.reshape(-1), used))
    return jnp.sum(scores) / jnp.maximum(jnp.sum(used), 1)
