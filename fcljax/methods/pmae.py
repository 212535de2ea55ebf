"""pMAE: prompting of masked autoencoders for federated continual learning (He et al. 2024, arXiv 2411.01916).

A masked autoencoder is frozen. One round of task t (Algorithm 1):

    client    trains discriminative prompts and a classifier on whole images, and a reconstructive prompt for
              the decoder by rebuilding images of which three quarters are hidden                (sec. IV-B)
              sends them, with what restores u images of each class: the encoder's tokens of their
              visible patches                                                                    (sec. IV-C)
    server    averages; restores images from these tokens with the prompt of their task, and trains prompts
              and classifier on them: on those of the current task, and when a task ends on those of all
              tasks, which it keeps                                                              (sec. IV-D)

The discriminative side may be any adapter; pMAE's own is `vpt`. What the server keeps of earlier tasks lies
on the host (federated/server_replay.py), and images are restored a batch at a time and not kept. Where the
paper and the authors' code differ, an option says which one is meant; the presets are the readings.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from fcljax.errors import InputError
from fcljax.federated.claims import within
from fcljax.models.heads import correct, cross_entropy
from fcljax.models.mae import Masking, hidden_pixels, random_mask, reconstruction_loss, unpatchify
from fcljax.options import option
from fcljax.parts.client import ClientEnd, ClientRule, ClientStep, Report
from fcljax.parts.federate import Run, ServerState, federate, linear_learner
from fcljax.parts.learner import Learner, Params, cross_entropy_loss
from fcljax.parts.replay import pass_over
from fcljax.parts.reports import start_at_class_means, weights_at_means
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.pixels import between, to_unit
from fcljax.settings import Preset
from fcljax.types import (
    Autoencoder,
    Batch,
    ClientContext,
    Frozen,
    LearningRate,
    Method,
    Network,
    Reconstruction,
    ReplayBatch,
    ReplayBuffer,
    RoundContext,
    ServerReplay,
    Sizes,
    Task,
    Weighted,
)

# Names of the client rule and of the server rule
RECONSTRUCTION = "reconstruction"
RESTORE = "restore"


@dataclasses.dataclass(frozen=True)
class PmaeOptions:
    """Options of pMAE; the values are the release's."""

    mask_ratio: float = option(0.75, most=0.99)
    """Fraction of the patches to mask."""
    recon_length: int = 5
    """Tokens of the reconstructive prompt."""
    recon_weight: float = 1.0
    """Weight lambda of the reconstruction in the clients' loss."""
    restore_images: int = 4
    """Number u of images per class for which a client uploads what reconstructs them."""
    tune_epochs: int = option(5, least=0)
    """Number of server epochs on reconstructed images."""
    tune_batch: int = 128
    """Number of reconstructed images per server step."""
    tune_lr: LearningRate = option(1e-3, positive=True, learning_rate=True)
    """Learning rate of the server's Adam."""
    recon_denorm: bool = True
    """Map reconstructed images from the decoder's pixel range to the classifier's."""
    exact_task_match: bool = True
    """Reconstruct a task's images with its own prompt only. Otherwise also with those of
    tasks whose number starts with its number, as the release does."""
    headtune: bool = False
    """Start a new task's classes at the normalised mean features of all clients."""
    wo_recon_prompt: bool = False
    """Ablation: give the decoder no prompt."""
    wo_restore_pool: bool = False
    """Ablation: reconstruct the current task's images only."""


PRESETS = {
    "intended": Preset(PmaeOptions()),
    "paper": Preset(PmaeOptions(recon_denorm=False)),
    "released": Preset(PmaeOptions(recon_denorm=False, exact_task_match=False)),
    "improved": Preset(PmaeOptions(headtune=True)),
}


def pmae(options: PmaeOptions, run: Run) -> Method:
    """pMAE as a method, on any adapter.

    Raises:
      InputError: for a network without a decoder.
    """
    pair = autoencoder_of(run.network)
    learner = linear_learner(run)
    keeping = keep_tokens(options, run, pair)
    starting = (start_at_class_means(run, weights_at_means),) if options.headtune else ()
    return federate(
        run,
        learner,
        loss=cross_entropy_loss(),
        client_rules=() if options.wo_recon_prompt else (reconstruction(options, pair),),
        server_rules=(keeping, *starting),
        server_replay=train_on_restored(options, learner),
    )


def autoencoder_of(network: Network) -> Autoencoder:
    """The network's masked autoencoder.

    Raises:
      InputError: if it has none.
    """
    if network.autoencoder is None:
        raise InputError(
            "decoder: the network has none, and pMAE rebuilds images with one; give --decoder FILE, as from "
            "`fcljax pretrain-decoder`, or a checkpoint of a masked autoencoder"
        )
    return network.autoencoder


# ---- client: reconstruction (section IV-B) -----------------------------------------------------------------


def reconstruction(options: PmaeOptions, pair: Autoencoder) -> ClientRule:
    """lambda times the mean squared error of hidden patches, under the reconstructive prompt, which trains
    and travels. No other parameter has a gradient of it: the encoder sees no prompts."""

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        image = between(step.learner.network, pair, step.batch.image)
        masking = random_mask(example_keys(step, 0), len(image), pair.patches, options.mask_ratio)
        prompt = step.trainable.extra[RECONSTRUCTION]
        patches = rebuilt(pair, step.context.frozen, image, masking, prompt)
        return options.recon_weight * reconstruction_loss(patches, image, masking.masked, step.batch.mask)

    def prompt(key: PRNGKeyArray) -> Float[Array, "length width"]:
        return jax.random.uniform(key, (options.recon_length, pair.width), minval=-1.0, maxval=1.0)

    return ClientRule(RECONSTRUCTION, loss, parameters=prompt)


def example_keys(step: ClientStep, purpose: int) -> Key[Array, " batch"]:
    """A key for each example of the batch: draws belong to the example, not to the client that holds it."""
    keys = step.batch.keys
    assert keys is not None
    return jax.vmap(jax.random.fold_in, (0, None))(keys, purpose)


def rebuilt(
    pair: Autoencoder,
    frozen: Frozen,
    image: Float[Array, "batch h w 3"],
    masking: Masking,
    prompt: Float[Array, "..."] | None,
) -> Float[Array, "batch patches pixels"]:
    """All patches of images of which the encoder sees some, in the pair's own range of pixels; visible
    patches are not pasted back."""
    latent = pair.encode(frozen.network, image, masking.keep)
    return pair.decode(frozen.decoder, latent, masking.restore, prompt)


# ---- client: tokens that restore images (section IV-C) -----------------------------------------------------


class Restore(NamedTuple):
    """What restores images, u of each of the task's classes."""

    latent: Float[Array, "*clients Ct u tokens width"]
    """The encoder's tokens of the visible patches."""
    order: Int[Array, "*clients Ct u patches"]
    """Where the patches belong."""
    present: Bool[Array, "*clients Ct u"]


class Drawn(NamedTuple):
    """The choice so far: the examples with the highest priorities of each class."""

    restore: Restore
    priority: Float[Array, "Ct u"]
    """-1: no example yet."""
    index: Int[Array, "Ct u"]
    """Id of the training example."""


def restore_tokens(options: PmaeOptions, run: Run, pair: Autoencoder) -> Report:
    """u random examples of each class, or all if there are fewer, encoded without prompts under a random
    mask, in a pass over the client's images without augmentation (specification 3.4)."""

    def init(_context: ClientContext) -> Drawn:
        restore = no_restore(options, run.sizes, run.network, pair)
        shape = restore.present.shape
        return Drawn(restore, jnp.full(shape, -1.0), jnp.zeros(shape, jnp.int32))

    def offer(step: ClientStep, drawn: Drawn) -> Drawn:
        batch = step.batch
        image = between(step.learner.network, pair, batch.image)
        masking = random_mask(example_keys(step, 0), len(image), pair.patches, options.mask_ratio)
        latent = pair.encode(step.context.frozen.network, image, masking.keep)
        priority = jax.vmap(jax.random.uniform)(example_keys(step, 1))
        more = Restore(latent, masking.restore, batch.mask)
        return draw_examples(drawn, step.context.task, more, priority, batch)

    def finalize(_end: ClientEnd, drawn: Drawn) -> Restore:
        return in_order(drawn)

    # the server merges none of it, so that any aggregation rule is followed
    view = pass_over(run.training.batch_size)
    return Report(RESTORE, init, offer, finalize, view, follows_rule=True, possible=possible_tokens)


def possible_tokens(context: ClientContext, sent: Restore) -> Bool[Array, ""]:
    """Whether there are no more images than the client has examples, with patches in places that exist."""
    images = jnp.sum(sent.present) <= context.client.examples
    return images & within(sent.order, 0, sent.order.shape[-1] - 1)


def no_restore(options: PmaeOptions, sizes: Sizes, network: Network, pair: Autoencoder) -> Restore:
    """Places for u images of each of a task's classes, none of them taken."""
    kept = int(pair.patches * (1 - options.mask_ratio))
    place = (sizes.task_classes, options.restore_images)
    latent = jnp.zeros((*place, 1 + kept, network.width))
    return Restore(latent, jnp.zeros((*place, pair.patches), jnp.int32), jnp.zeros(place, bool))


def draw_examples(
    drawn: Drawn, task: Task, more: Restore, priority: Float[Array, " batch"], batch: Batch
) -> Drawn:
    """The examples with the highest priorities of each class, of those so far and a batch [batch, ...]."""
    classes, u = drawn.priority.shape
    mine = (task.classes[:, None] == batch.label) & more.present
    diagonal = jnp.eye(classes, dtype=bool)[:, :, None]
    own = jnp.where(diagonal, drawn.priority, -1.0).reshape(classes, classes * u)
    every = jnp.concatenate([own, jnp.where(mine, priority, -1.0)], axis=1)  # [Ct, Ct * u + batch]
    best, chosen = jax.lax.top_k(every, u)

    def pick(old: Array, new: Array) -> Array:
        return jnp.concatenate([old.reshape(classes * u, *old.shape[2:]), new])[chosen]

    restore = Restore(*map(pick, drawn.restore, more))
    return Drawn(restore._replace(present=best >= 0), best, pick(drawn.index, batch.index))


def in_order(drawn: Drawn) -> Restore:
    """What was drawn; where there are no more examples than wanted, in the order of the data set. Places that
    are not taken hold zeros."""
    present = drawn.restore.present
    full = jnp.all(present, axis=1, keepdims=True)
    last = jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(full, 0, jnp.where(present, drawn.index, last)), axis=1, stable=True)

    def sort(x: Array) -> Array:
        return jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1)

    taken = sort(present)

    def keep(x: Array) -> Array:
        return jnp.where(taken.reshape(*taken.shape, *[1] * (x.ndim - 2)), sort(x), 0)

    return Restore(keep(drawn.restore.latent), keep(drawn.restore.order), taken)


# ---- server: the restore pool and its images (section IV-D) ------------------------------------------------


class RestorePool(NamedTuple):
    """What the server keeps."""

    restore: Restore
    """[K, Ct, u, ...]: each client's newest tokens of the current task."""
    task: Int[Array, ""]
    """The current task; -1: none yet."""
    prompt: Float[Array, "T length width"] | None
    """The reconstructive prompt that each task ended with; None without prompts."""


def keep_tokens(options: PmaeOptions, run: Run, pair: Autoencoder) -> ServerRule:
    """Keeps the clients' tokens, and the averaged reconstructive prompt as the task's."""
    sizes = run.sizes

    def init(params: Params, _trainable: Params) -> RestorePool:
        none = no_restore(options, sizes, run.network, pair)
        every = jax.tree.map(lambda x: jnp.zeros((sizes.clients, *x.shape), x.dtype), none)
        prompt = params.extra.get(RECONSTRUCTION)
        prompts = None if prompt is None else jnp.zeros((sizes.tasks, *prompt.shape))
        return RestorePool(every, jnp.int32(-1), prompts)

    def update(round: ServerRound, params: Params, pool: RestorePool) -> ServerUpdate:
        index = round.task.index
        arrived = round.reports[RESTORE]
        kept = pool.restore._replace(present=pool.restore.present & (pool.task == index))
        client = jnp.where(round.valid, round.ids, sizes.clients)
        kept = jax.tree.map(lambda old, new: old.at[client].set(new, mode="drop"), kept, arrived)
        own = params.extra.get(RECONSTRUCTION)
        prompts = pool.prompt
        prompts = None if own is None or prompts is None else prompts.at[index].set(own)
        pool = RestorePool(kept, jnp.asarray(index, jnp.int32), prompts)
        sent = jnp.sum(arrived.present & round.valid[:, None, None])
        images = Weighted(sent.astype(jnp.float32), jnp.ones(()))
        return ServerUpdate(params, pool, {"images": images})

    return ServerRule(RESTORE, update, init, reports=(restore_tokens(options, run, pair),))


def train_on_restored(options: PmaeOptions, learner: Learner) -> ServerReplay:
    """The server's training on restored images, with an Adam that is new in every round: of adapter and
    classifier, by cross-entropy over the classes of the images."""
    adam = optax.scale_by_adam()

    def start(round_context: RoundContext, server: ServerState) -> tuple[Params, optax.OptState]:
        trainable = learner.trainable(server.params, round_context.task)
        return trainable, adam.init(trainable)

    def step(
        round_context: RoundContext,
        server: ServerState,
        local: tuple,
        images: ReplayBatch,
        _key: PRNGKeyArray,
    ):
        trainable, optimiser = local
        batch = restored_batch(options, round_context, learner, pool_of(server), images)

        def loss_of(trainable: Params):  # a server has all parameters, of which clients cache some
            frozen = round_context.frozen
            task = round_context.task
            logits = learner.forward(frozen, server.params, trainable, batch, task, False).logits
            return cross_entropy(logits, batch.label, images.classes, batch.mask), logits

        (loss, logits), gradient = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        direction, optimiser = adam.update(gradient, optimiser, trainable)
        trainable = jax.tree.map(lambda x, by: x - options.tune_lr * by, trainable, direction)
        count = jnp.sum(batch.mask).astype(jnp.float32)
        right = correct(logits, batch.label, images.classes, batch.mask)
        metrics = {"loss": Weighted(loss * count, count), "accuracy": Weighted(right, count)}
        return (trainable, optimiser), metrics

    def finish(round_context: RoundContext, server: ServerState, local: tuple) -> ServerState:
        return server._replace(params=learner.merge(server.params, round_context.task, local[0]))

    return ServerReplay(
        buffer=current_tokens,
        plan=functools.partial(restore_plan, options),
        epochs=options.tune_epochs,
        batch_size=options.tune_batch,
        start=start,
        step=step,
        finish=finish,
        reconstruct=functools.partial(reconstruct, options, learner.network),
    )


def pool_of(server: ServerState) -> RestorePool:
    """The state of `keep_tokens`, the method's first server rule."""
    return server.rules[0]


class Stored(NamedTuple):
    """What restores images, as the pool keeps it: [N, ...]."""

    latent: Float[Array, "N tokens width"]
    order: Int[Array, "N patches"]


def current_tokens(round_context: RoundContext, server: ServerState) -> ReplayBuffer:
    """The current task's part of the pool, image by image."""
    pool = pool_of(server)
    task = round_context.task

    def flat(x: Array) -> Array:
        return x.reshape(-1, *x.shape[3:])

    present = pool.restore.present & (pool.task == task.index)
    label = jnp.broadcast_to(task.classes[None, :, None], present.shape)
    stored = Stored(flat(pool.restore.latent), flat(pool.restore.order))
    return ReplayBuffer(stored, flat(label), flat(present))


def restore_plan(options: PmaeOptions, task: int, last: bool) -> tuple[tuple[int, int], ...]:
    """Whose images the server restores in a round of a task, and with whose prompt: in its last round those
    of all tasks so far, else its own (Algorithm 1).

    The release finds a task's uploads by the text of its number, so that those of tasks 10 to 19 are restored
    with the prompt of task 1 too; `exact_task_match` off does that.
    """
    wanted = range(task + 1) if last and not options.wo_restore_pool else (task,)

    def matches(source: int, of: int) -> bool:
        return source == of or (not options.exact_task_match and str(source).startswith(str(of)))

    return tuple((source, of) for of in wanted for source in range(task + 1) if matches(source, of))


def restored_batch(
    options: PmaeOptions,
    round_context: RoundContext,
    learner: Learner,
    pool: RestorePool,
    images: ReplayBatch,
) -> Batch:
    """Images restored with the prompts of their tasks, as the classifier's input."""
    pair = autoencoder_of(learner.network)
    prompt = None if pool.prompt is None else pool.prompt[images.task]
    image = restored(pair, round_context.frozen, images.examples, prompt)
    if options.recon_denorm:
        image = between(pair, learner.network, image)
    return Batch(image, images.label, images.mask, jnp.zeros_like(images.label) - 1)


def restored(
    pair: Autoencoder, frozen: Frozen, stored: Stored, prompt: Float[Array, "..."] | None
) -> Float[Array, "batch h w 3"]:
    """Images from what the pool keeps, in the pair's own range of pixels, neither clipped nor pasted."""
    return unpatchify(pair.decode(frozen.decoder, stored.latent, stored.order, prompt), pair.patch)


def reconstruct(
    options: PmaeOptions,
    network: Network,
    round_context: RoundContext,
    server: ServerState,
    image: Float[Array, "batch h w 3"],
    key: PRNGKeyArray,
) -> Reconstruction:
    """What the server could rebuild of images (as the network reads them) if clients sent their tokens."""
    pair = autoencoder_of(network)
    frozen = round_context.frozen
    own = between(network, pair, image)
    masking = random_mask(key, len(image), pair.patches, options.mask_ratio)

    def pixels(prompt: Array | None) -> Float[Array, "batch h w 3"]:
        return to_unit(pair, unpatchify(rebuilt(pair, frozen, own, masking, prompt), pair.patch))

    prompt = server.params.extra.get(RECONSTRUCTION)
    plain = pixels(None)
    original = to_unit(pair, own)
    hidden = hidden_pixels(masking.masked, pair.patch)
    masked = jnp.where(hidden, 0.5, original)
    return Reconstruction(original, masked, plain, plain if prompt is None else pixels(prompt), hidden)
