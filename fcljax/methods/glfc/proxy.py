"""The proxy server of GLFC and LGA (specifications B9, B10 and B'), which chooses what clients distil.

When clients meet a new task they send gradients of prototype images. The proxy infers their labels, rebuilds
the images by matching gradients, and from then on lets every merged model predict them: the best one so far
goes down with the newest, and so does the best one from before the gradients came.
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

REPORT = "gradients"  # the name of the clients' term, under which their gradients arrive
LINE_SEARCH = 10  # evaluations of a step of L-BFGS at the most


@dataclasses.dataclass(frozen=True)
class ProxyOptions:
    """How prototypes travel, and how the proxy judges models."""

    prototype_steps: int = option(50, least=0)
    """Number of gradient steps that perturb a prototype."""
    prototype_lr: float = option(0.2, positive=True)
    """Learning rate of these steps."""
    prototype_decay: float = 1e-5
    """Weight decay of these steps."""
    gradient_side: int = 32
    """Side in pixels at which prototypes are sent and rebuilt; larger images are resized to it."""
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


class Sent(NamedTuple):
    """What a client sends of its prototypes: a gradient for each of the task's classes, which of them there
    are, and how far the features of its classes are spread (the mean variance of a number)."""

    gradient: LeNet  # leaves [Ct, ...]
    there: Bool[Array, "*clients Ct"]
    spread: Float[Array, "*clients"]


class Old(NamedTuple):
    """A model that can be distilled."""

    trainable: Params
    task: Task
    """In which it was merged; index -1: there is none."""


class Choice(NamedTuple):
    """The best model from before the newest gradients came, and the best one since."""

    previous: Old
    current: Old


class Monitor(NamedTuple):
    """The images that models are judged by, those of a client's class together, and their inferred labels."""

    image: Float[Array, "clients Ct states h w 3"]
    label: Int[Array, "clients Ct"]
    used: Bool[Array, "clients Ct"]


class Proxy(NamedTuple):
    """What the proxy keeps."""

    choice: Choice
    monitor: Monitor
    best: Float[Array, ""]
    """The best score since its last reset."""
    radius: Float[Array, ""]
    """The spread of features in the first task."""


@runtime_checkable
class Judge(Protocol):
    """Returns the share of the proxy's images that a model predicts."""

    def __call__(
        self, round: ServerRound, params: Params, proxy: Proxy, key: PRNGKeyArray, /
    ) -> Float[Array, ""]: ...


# ---- what clients send -------------------------------------------------------------------------------------


def side_of(options: ProxyOptions, network: Network) -> tuple[int, int]:
    """Height and width in which prototypes are sent."""
    height, width, _ = network.image
    return min(height, options.gradient_side), min(width, options.gradient_side)


def shared_lenet(options: ProxyOptions, network: Network, classes: int) -> LeNet:
    """The network by whose gradients images are sent: from a key that everybody knows."""
    return init_lenet(jax.random.key(0), *side_of(options, network), classes)


def encode(
    options: ProxyOptions,
    network: Network,
    classes: int,
    pixels: Float[Array, "Ct h w 3"],
    label: Int[Array, " Ct"],
) -> LeNet:
    """The gradient of each image under the shared network."""
    params = shared_lenet(options, network, classes)
    small = resize(pixels, *side_of(options, network))
    return jax.vmap(gradient_of, (None, 0, 0))(params, small, jax.nn.one_hot(label, classes))


def resize(pixels: Float[Array, "n h w 3"], height: int, width: int) -> Float[Array, "n h2 w2 3"]:
    """Images at another size, bilinear; the same where it is theirs."""
    if pixels.shape[1:3] == (height, width):
        return pixels
    return jax.image.resize(pixels, (len(pixels), height, width, 3), "bilinear")


# ---- the server rule ---------------------------------------------------------------------------------------


def proxy_server(options: ProxyOptions, run: Run, judge: Judge, gradients: Report) -> ServerRule:
    """After every merge: rebuild the images of gradients that came, judge the merged model, send the choice.

    Args:
      options: of the method.
      run: for sizes and the network.
      judge: how a model is judged.
      gradients: what clients report.
    """

    def init(params: Params, trainable: Params) -> Proxy:
        del params
        return _new(options, run, trainable)

    def update(round: ServerRound, params: Params, proxy: Proxy) -> ServerUpdate:
        sent = round.reports[REPORT]
        (build, score_key) = jax.random.split(round.key)
        there = sent.there & round.valid[:, None]
        arrive = functools.partial(_arrive, options, run, round, sent, there, build)
        arrived = jnp.any(there)
        proxy = jax.lax.cond(arrived, arrive, lambda proxy: proxy, proxy)
        second = (round.task.index == 1) & (round.index == 0)
        reset = {"arrival": arrived, "second": second, "never": jnp.bool_(False)}
        best = jnp.where(reset[options.reset_best], 0.0, proxy.best)
        score = judge(round, params, proxy, score_key)
        current = one_of(score >= best, _now(round, params), proxy.choice.current)
        proxy = proxy._replace(choice=proxy.choice._replace(current=current), best=jnp.maximum(score, best))
        senders = jnp.sum(jnp.any(there, axis=1)).astype(jnp.float32)
        one = jnp.ones(())
        metrics = {"score": Weighted(score, one), "senders": Weighted(senders, one)}
        return ServerUpdate(params, proxy, metrics)

    def sends(task: Task, proxy: Proxy) -> Choice:
        del task
        return proxy.choice

    return ServerRule("proxy", update, init, sends, reports=(gradients,))


def _new(options: ProxyOptions, run: Run, trainable: Params) -> Proxy:
    """Before the first task. The radius is what LGA's release begins with."""
    sizes = run.sizes
    classes = jnp.zeros(sizes.classes, bool)
    no_task = Task(jnp.int32(-1), jnp.full(sizes.task_classes, -1, jnp.int32), classes, classes)
    none = Old(trainable._replace(extra={}), no_task)
    shape = sizes.clients, sizes.task_classes
    image = jnp.zeros((*shape, options.monitor_images, *side_of(options, run.network), 3))
    monitor = Monitor(image, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))
    return Proxy(Choice(none, none), monitor, jnp.zeros(()), jnp.float32(0.15))


def _now(round: ServerRound, params: Params) -> Old:
    task = jax.tree.map(jnp.asarray, round.task)
    index = task.index.astype(jnp.int32)
    classes = task.classes.astype(jnp.int32)
    trainable = round.learner.trainable(params, round.task)
    return Old(trainable, task._replace(index=index, classes=classes))


def _arrive(
    options: ProxyOptions,
    run: Run,
    round: ServerRound,
    sent: Sent,
    there: Bool[Array, "P Ct"],
    key: PRNGKeyArray,
    proxy: Proxy,
) -> Proxy:
    """New images replace all others, and the best model so far becomes the one from before."""
    keys = jax.random.split(key, len(there))
    label = label_of(sent.gradient)
    lenet = shared_lenet(options, run.network, run.sizes.classes)
    rebuild_one = functools.partial(_rebuild_client, options, lenet, side_of(options, run.network))
    image = jax.lax.map(lambda args: rebuild_one(*args), (keys, sent.gradient, label, there))

    def put(every: Array, some: Array) -> Array:
        return jnp.zeros_like(every).at[: len(some)].set(some)

    monitor = jax.tree.map(put, proxy.monitor, Monitor(image, label, there))
    clients = jnp.any(there, axis=1)
    spread = jnp.sum(jnp.where(clients, sent.spread, 0.0)) / jnp.maximum(jnp.sum(clients), 1)
    radius = jnp.where(round.task.index == 0, jnp.sqrt(spread), proxy.radius)
    choice = Choice(proxy.choice.current, proxy.choice.current)
    return proxy._replace(choice=choice, monitor=monitor, radius=radius)


def _rebuild_client(
    options: ProxyOptions,
    lenet: LeNet,
    side: tuple[int, int],
    key: PRNGKeyArray,
    gradient: LeNet,
    label: Int[Array, " Ct"],
    there: Bool[Array, " Ct"],
) -> Float[Array, "Ct states h w 3"]:
    """The images of one client's gradients; zeros where it sent none."""
    states = options.monitor_images
    nothing = jnp.zeros((states, *side, 3))

    def one(args: tuple) -> Array:
        key, gradient, label, there = args
        build = functools.partial(rebuild, options, lenet, side, key, gradient, label)
        return jax.lax.cond(there, build, lambda: nothing)

    return jax.lax.map(one, (jax.random.split(key, len(there)), gradient, label, there))


def rebuild(
    options: ProxyOptions,
    lenet: LeNet,
    side: tuple[int, int],
    key: PRNGKeyArray,
    gradient: LeNet,
    label: Int[Array, ""],
) -> Float[Array, "states h w 3"]:
    """The last states of an image whose gradient is brought to this one by L-BFGS (deep leakage from
    gradients, Zhu et al. 2019; specification B10): pixels in [0, 1]."""
    target = jax.nn.one_hot(label, gradient.bias.shape[-1])

    def apart(image: Float[Array, "h w 3"]) -> Float[Array, ""]:
        gap = jax.tree.map(jnp.subtract, gradient_of(lenet, image, target), gradient)
        return optax.tree.norm(gap, squared=True)

    noise = jax.random.normal(key, (*side, 3))
    count = options.monitor_images
    start = 0.5 + 0.1 * noise if options.match_start == "grey" else noise
    lbfgs = optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(LINE_SEARCH))

    def step(i: Array, carry: tuple) -> tuple:
        image, state, last = carry
        value, slope = jax.value_and_grad(apart)(image)
        move, state = lbfgs.update(slope, state, image, value=value, grad=slope, value_fn=apart)
        image = optax.apply_updates(image, move)
        return image, state, last.at[i % count].set(image)

    first = start, lbfgs.init(start), jnp.broadcast_to(start, (count, *start.shape))
    last = jax.lax.fori_loop(0, options.match_steps, step, first)[2]
    return jnp.clip(last, 0.0, 1.0)


# ---- judging a model ---------------------------------------------------------------------------------------


def shown(
    options: ProxyOptions, learner: Learner, monitor: Monitor, key: PRNGKeyArray
) -> Float[Array, "clients Ct states h w 3"]:
    """The images in the training view at the network's size, pixels in [0, 1]: cropped and mirrored."""
    height, width, _ = learner.network.image
    flat = monitor.image.reshape(-1, *monitor.image.shape[3:])
    moved = jitter(key, resize(flat, height, width), options.monitor_padding)
    return moved.reshape(*monitor.image.shape[:3], height, width, 3)


def share_correct(
    options: ProxyOptions, round: ServerRound, params: Params, proxy: Proxy, key: PRNGKeyArray
) -> Float[Array, ""]:
    """GLFC's judge: the accuracy on the images among the seen classes; 0 if there are none."""
    learner = round.learner
    task = round.task
    monitor = proxy.monitor
    trainable = learner.trainable(params, task)

    def share(args: tuple) -> Array:
        pixels, label = args
        output = learner.forward(round.frozen, params, trainable, unlabelled(learner, pixels), task, False)
        found = jnp.argmax(jnp.where(task.seen, output.logits, -jnp.inf), axis=-1)
        return jnp.mean(found == label)

    image = shown(options, learner, monitor, key)
    return over_used(share, image.reshape(-1, *image.shape[2:]), monitor)


def over_used(
    share: Callable[[tuple], Float[Array, ""]], places: PyTree, monitor: Monitor
) -> Float[Array, ""]:
    """The mean over the used places of share((what lies there, its label)); the others are not looked at.

    Args:
      share: of what is right in a place.
      places: leaves [clients * Ct, ...].
      monitor: which places are used, and their labels.
    """
    used = monitor.used.reshape(-1)

    def one(args: tuple) -> Array:
        place, taken = args
        return jax.lax.cond(taken, lambda: jnp.asarray(share(place), jnp.float32), lambda: jnp.zeros(()))

    right = jax.lax.map(one, ((places, monitor.label.reshape(-1)), used))
    return jnp.sum(right) / jnp.maximum(jnp.sum(used), 1)
