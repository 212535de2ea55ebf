"""The proxy server of GLFC and LGA (specifications B9, B10 and B'), which chooses what clients distil.

When clients meet a new task they send gradients of prototype images. The proxy infers their labels, rebuilds
the images by matching gradients, and from then on lets every merged model predict them: the best one so far
goes down with the newest, and so does the best one from before the gradients came.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.methods.glfc.lenet import LeNet, gradient_of, init_lenet, label_of
from fcljax.options import option
from fcljax.parts.federate import ServerStep
from fcljax.parts.learner import Learner, Model
from fcljax.parts.task_start import unlabelled
from fcljax.pixels import jitter
from fcljax.types import Aggregate, Network, RoundContext, Sizes, Task, Weighted

REPORT = "gradients"  # the name of the clients' term, under which their gradients arrive
LINE_SEARCH = 10  # evaluations of a step of L-BFGS at the most


@dataclasses.dataclass(frozen=True)
class ProxyOptions:
    """How prototypes travel, and how the proxy judges models."""

    prototype_steps: int = option(50, least=0)
    """Steps of gradient descent that perturb a prototype."""
    prototype_lr: float = option(0.2, positive=True)
    """Learning rate of the steps that perturb a prototype."""
    prototype_decay: float = 1e-5
    """Weight decay of the steps that perturb a prototype."""
    gradient_side: int = 32
    """Side in pixels at which prototypes are sent and rebuilt; larger images are resized to it."""
    match_steps: int = 100
    """Steps of L-BFGS that rebuild an image (release: 250 of 20 each)."""
    match_start: Literal["grey", "normal"] = "grey"
    """Noise that an image is rebuilt from: of a tenth around grey, or standard normal."""
    monitor_images: int = 4
    """Last states of each rebuilt image that models must predict."""
    monitor_padding: float = option(0.125, most=1.0)
    """Padding of these images before a crop, over the side."""
    reset_best: Literal["arrival", "second", "never"] = "arrival"
    """When the best score starts anew: with new gradients, with the second task, or never."""


class Sent(NamedTuple):
    """What a client sends of its prototypes: a gradient for each of the task's classes, which of them there
    are, and how far the features of its classes are spread (the mean variance of a number)."""

    gradient: LeNet  # leaves [Ct, ...]
    there: Bool[Array, "*clients Ct"]
    spread: Float[Array, "*clients"]


class Old(NamedTuple):
    """A model that can be distilled, and the task that it was merged in (index -1: there is none)."""

    part: Model
    task: Task


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
    """What the proxy keeps: the models, the images, the best score since its last reset, and the spread of
    features in the first task."""

    choice: Choice
    monitor: Monitor
    best: Float[Array, ""]
    radius: Float[Array, ""]


# (turn, learner, params, proxy, key) -> the share of the images that a model predicts, as the proxy sees it
Judge = Callable[[RoundContext, Learner, Model, Proxy, PRNGKeyArray], Float[Array, ""]]


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


# ---- the server step ---------------------------------------------------------------------------------------


def proxy_server(options: ProxyOptions, sizes: Sizes, network: Network, judge: Judge) -> ServerStep:
    """After every merge: rebuild the images of gradients that came, judge the merged model, send the choice.

    Args:
      options: resolved.
      setting: sizes of the run.
      network: whose image sizes and pixel range count.
      judge: how a model is judged.
    """

    def step(
        round_context: RoundContext,
        learner: Learner,
        params: Model,
        proxy: Proxy,
        aggregate: Aggregate,
        key: Array,
    ):
        sent, (build, score_key) = aggregate.gather[REPORT], jax.random.split(key)
        there = sent.there & aggregate.valid[:, None]
        arrive = functools.partial(_arrive, options, network, sizes, round_context, sent, there, build)
        arrived = jnp.any(there)
        proxy = jax.lax.cond(arrived, arrive, lambda proxy: proxy, proxy)
        second = (round_context.task.index == 1) & (round_context.round == 0)
        reset = {"arrival": arrived, "second": second, "never": jnp.bool_(False)}
        best = jnp.where(reset[options.reset_best], 0.0, proxy.best)
        score = judge(round_context, learner, params, proxy, score_key)
        choice = proxy.choice._replace(
            current=_pick(score >= best, _now(round_context, learner, params), proxy.choice.current)
        )
        proxy = proxy._replace(choice=choice, best=jnp.maximum(score, best))
        senders = jnp.sum(jnp.any(there, axis=1)).astype(jnp.float32)
        one = jnp.ones(())
        return params, proxy, {"score": Weighted(score, one), "senders": Weighted(senders, one)}

    return ServerStep(
        "proxy",
        step,
        init=lambda params, part: _new(options, sizes, network, part),
        sends=lambda task, proxy: proxy.choice,
        hears=(REPORT,),
        follows_rule=True,
    )


def _new(options: ProxyOptions, sizes: Sizes, network: Network, part: Model) -> Proxy:
    """Before the first task. The radius is what LGA's release begins with."""
    classes = jnp.zeros(sizes.classes, bool)
    no_task = Task(jnp.int32(-1), jnp.full(sizes.task_classes, -1, jnp.int32), classes, classes)
    none = Old(part._replace(extra={}), no_task)
    places = sizes.clients, sizes.task_classes
    image = jnp.zeros((*places, options.monitor_images, *side_of(options, network), 3))
    monitor = Monitor(image, jnp.zeros(places, jnp.int32), jnp.zeros(places, bool))
    return Proxy(Choice(none, none), monitor, jnp.zeros(()), jnp.float32(0.15))


def _now(round_context: RoundContext, learner: Learner, params: Model) -> Old:
    task = jax.tree.map(jnp.asarray, round_context.task)
    index, classes = task.index.astype(jnp.int32), task.classes.astype(jnp.int32)
    return Old(learner.part(params, round_context.task), task._replace(index=index, classes=classes))


def _pick(condition: Bool[Array, ""], new: Old, old: Old) -> Old:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _arrive(
    options: ProxyOptions,
    network: Network,
    sizes: Sizes,
    round_context: RoundContext,
    sent: Sent,
    there: Bool[Array, "P Ct"],
    key: PRNGKeyArray,
    proxy: Proxy,
) -> Proxy:
    """New images in the place of all others, and the best model so far becomes the one from before."""
    keys = jax.random.split(key, len(there))
    label = label_of(sent.gradient)
    lenet = shared_lenet(options, network, sizes.classes)
    one = functools.partial(_rebuild_client, options, lenet, side_of(options, network))
    image = jax.lax.map(lambda args: one(*args), (keys, sent.gradient, label, there))
    put = lambda all_, some: jnp.zeros_like(all_).at[: len(some)].set(some)
    monitor = jax.tree.map(put, proxy.monitor, Monitor(image, label, there))
    clients = jnp.any(there, axis=1)
    spread = jnp.sum(jnp.where(clients, sent.spread, 0.0)) / jnp.maximum(jnp.sum(clients), 1)
    radius = jnp.where(round_context.task.index == 0, jnp.sqrt(spread), proxy.radius)
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

    noise, count = jax.random.normal(key, (*side, 3)), options.monitor_images
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


def share_right(
    options: ProxyOptions,
    round_context: RoundContext,
    learner: Learner,
    params: Model,
    proxy: Proxy,
    key: PRNGKeyArray,
) -> Float[Array, ""]:
    """GLFC's judge: the accuracy on the images among the seen classes; 0 if there are none."""
    part, monitor = learner.part(params, round_context.task), proxy.monitor

    def right(args: tuple) -> Array:
        pixels, label = args
        output = learner.forward(
            round_context.frozen, params, part, unlabelled(learner, pixels), round_context.task, False
        )
        found = jnp.argmax(jnp.where(round_context.task.seen, output.logits, -jnp.inf), axis=-1)
        return jnp.mean(found == label)

    image = shown(options, learner, monitor, key)
    return over_used(right, image.reshape(-1, *image.shape[2:]), monitor)


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
