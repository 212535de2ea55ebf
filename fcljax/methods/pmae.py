"""pMAE: prompting of masked autoencoders for federated continual learning (He et al.
2024, arXiv 2411.01916).

A masked autoencoder is frozen. One round of task t (Algorithm 1):

    client    trains discriminative prompts and a classifier on whole images, and a
              reconstructive prompt for the decoder by reconstructing images of which three
              quarters are hidden                                              (sec. IV-B)
              sends them, with the encoder's tokens of the visible patches of u images of
              each class, from which the server can restore the images         (sec. IV-C)
    server    averages; restores images from these tokens with the prompt of their task, and
              trains prompts and classifier on them: on those of the current task, and when a
              task ends on those of all tasks, whose tokens it keeps           (sec. IV-D)

The discriminative side may be any adapter; pMAE's is `vpt`. The tokens of earlier tasks
lie on the host (federated/server_replay.py), and images are restored a batch at a time
and not kept. Where the paper and the authors' code differ, an option says which one is
meant; the presets are the readings.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, Shaped

from fcljax.errors import InputError
from fcljax.federated.claims import within
from fcljax.models import heads, mae
from fcljax.options import DecoderOptions, option
from fcljax.parts.client import ClientEnd, ClientRule, ClientStep, Report
from fcljax.parts.federate import Run, ServerState, federate, linear_learner
from fcljax.parts.learner import Learner, Params, cross_entropy_loss
from fcljax.parts.replay import pass_over
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.pixels import between, to_unit
from fcljax.settings import Preset, RunConfig, with_mini
from fcljax.types import (
    Autoencoder,
    Batch,
    ClientContext,
    Frozen,
    LearningRate,
    Method,
    Metrics,
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

# names of the client rule and the server rule
RECONSTRUCTION = "reconstruction"
RESTORE = "restore"


@dataclasses.dataclass(frozen=True)
class PmaeOptions(DecoderOptions):
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
    wo_recon_prompt: bool = False
    """Ablation: give the decoder no prompt."""
    wo_restore_pool: bool = False
    """Ablation: reconstruct the current task's images only."""


PRESETS = with_mini(
    {
        "intended": Preset(PmaeOptions()),
        "paper": Preset(PmaeOptions(recon_denorm=False)),
        "released": Preset(PmaeOptions(recon_denorm=False, exact_task_match=False)),
        "improved": Preset(PmaeOptions(), RunConfig(headtune=True)),
    },
    lr=1e-2,
)


def pmae(options: PmaeOptions, run: Run) -> Method:
    """Compose pMAE on any adapter.

    Raises:
      InputError: for a network without a decoder.
    """
    autoencoder = autoencoder_of(run.network)
    learner = linear_learner(run)
    client_rules = ()
    if not options.wo_recon_prompt:
        client_rules = (reconstruction(options, autoencoder),)
    return federate(
        run,
        learner,
        loss=cross_entropy_loss(),
        client_rules=client_rules,
        server_rules=(keep_tokens(options, run, autoencoder),),
        server_replay=train_on_restored(options, learner),
    )


def autoencoder_of(network: Network) -> Autoencoder:
    """Return the network's masked autoencoder.

    Raises:
      InputError: if it has none.
    """
    if network.autoencoder is None:
        raise InputError(
            "decoder: the network has none, but pMAE reconstructs images with a decoder; give "
            "--decoder FILE, as from `fcljax pretrain-decoder`, or a checkpoint of a masked autoencoder"
        )
    return network.autoencoder


# ---- client: reconstruction (section IV-B) ---------------------------------------------


def reconstruction(options: PmaeOptions, autoencoder: Autoencoder) -> ClientRule:
    """Add lambda times the mean squared error of hidden patches, and train its prompt.

    The reconstructive prompt is a parameter of this rule and travels. No other parameter
    gets a gradient of the loss: the encoder reads no prompts.
    """

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        # the autoencoder may expect another pixel range than the classifier's network
        image = between(step.learner.network, autoencoder, step.batch.input)
        masking = masks_of(options, step, autoencoder)
        prompt = step.trainable.extra[RECONSTRUCTION]
        patches = reconstructed(autoencoder, step.context.frozen, image, masking, prompt)
        error = mae.reconstruction_loss(patches, image, masking.masked, step.batch.mask)
        return options.recon_weight * error

    def init_prompt(key: PRNGKeyArray) -> Float[Array, "length width"]:
        shape = (options.recon_length, autoencoder.width)
        return jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)

    return ClientRule(RECONSTRUCTION, loss, parameters=init_prompt)


def masks_of(
    options: PmaeOptions,
    step: ClientStep,
    autoencoder: Autoencoder,
) -> mae.Masking:
    """Draw the patches of each example that are hidden."""
    keys = example_keys(step, 0)
    return mae.random_mask(keys, len(keys), autoencoder.patches, options.mask_ratio)


def example_keys(step: ClientStep, purpose: int) -> Key[Array, " batch"]:
    """Return a key for each example, the same at every client that has it."""
    # not the client's key: who trains an example must not change which patches are hidden
    keys = step.batch.keys
    assert keys is not None
    return jax.vmap(jax.random.fold_in, (0, None))(keys, purpose)


def reconstructed(
    autoencoder: Autoencoder,
    frozen: Frozen,
    image: Float[Array, "batch h w 3"],
    masking: mae.Masking,
    prompt: Float[Array, "..."] | None,
) -> Float[Array, "batch patches pixels"]:
    """Reconstruct all patches from the visible ones, in the autoencoder's pixel range.

    Visible patches are reconstructed too, and not pasted back.
    """
    # only visible patches, a quarter by default: hidden ones cost nothing in the encoder
    latent = autoencoder.encode(frozen.network, image, masking.keep)
    return autoencoder.decode(frozen.decoder, latent, masking.restore, prompt)


# ---- client: tokens that restore images (section IV-C) ---------------------------------


class Restore(NamedTuple):
    """Tokens that restore images, u of each of the task's classes."""

    latent: Float[Array, "*clients Ct u tokens width"]
    """The encoder's tokens of the visible patches."""
    order: Int[Array, "*clients Ct u patches"]
    """The positions of the patches in the image."""
    present: Bool[Array, "*clients Ct u"]
    """Entries that hold an image."""


class RestoreSample(NamedTuple):
    """The examples of each class with the highest priorities so far."""

    restore: Restore
    priority: Float[Array, "Ct u"]
    """-1: no example yet."""
    index: Int[Array, "Ct u"]
    """Index of the training example."""


def restore_tokens(options: PmaeOptions, run: Run, autoencoder: Autoencoder) -> Report:
    """Report tokens of u random examples of each class, or of all if there are fewer.

    They are encoded without prompts under a random mask, in a pass over the client's
    images without augmentation.
    """

    def init(_context: ClientContext) -> RestoreSample:
        restore = no_restore(options, run.sizes, run.network, autoencoder)
        shape = restore.present.shape
        return RestoreSample(restore, jnp.full(shape, -1.0), jnp.zeros(shape, jnp.int32))

    def offer(step: ClientStep, sample: RestoreSample) -> RestoreSample:
        batch = step.batch
        image = between(step.learner.network, autoencoder, batch.input)
        masking = masks_of(options, step, autoencoder)
        latent = autoencoder.encode(step.context.frozen.network, image, masking.keep)
        offered = Restore(latent, masking.restore, batch.mask)
        # purpose 1, not 0: the choice of examples is independent of their masks
        priority = jax.vmap(jax.random.uniform)(example_keys(step, 1))
        return draw_examples(sample, step.context.task, offered, priority, batch)

    def finalize(_end: ClientEnd, sample: RestoreSample) -> Restore:
        return in_order(sample)

    # `follows_rule`: the server merges no tokens, so any aggregation rule may be chosen
    view = pass_over(run.training.batch_size)
    return Report(RESTORE, init, offer, finalize, view, follows_rule=True, possible=possible_tokens)


def possible_tokens(context: ClientContext, reported: Restore) -> Bool[Array, ""]:
    """Check that a client reports no more images than it has examples, and patches at
    existing positions."""
    # further images would outweigh other clients' in the restore pool
    images_fit = jnp.sum(reported.present) <= context.client.examples
    return images_fit & within(reported.order, 0, reported.order.shape[-1] - 1)


def no_restore(
    options: PmaeOptions,
    sizes: Sizes,
    network: Network,
    autoencoder: Autoencoder,
) -> Restore:
    """Return empty entries for u images of each of a task's classes."""
    patches = autoencoder.patches
    # rounded down, as in MAE's random masking
    visible = int(patches * (1 - options.mask_ratio))
    shape = (sizes.task_classes, options.restore_images)
    # visible patches behind the class token
    latent = jnp.zeros((*shape, 1 + visible, network.width))
    order = jnp.zeros((*shape, patches), jnp.int32)
    return Restore(latent, order, jnp.zeros(shape, bool))


def draw_examples(
    sample: RestoreSample,
    task: Task,
    offered: Restore,
    priority: Float[Array, " batch"],
    batch: Batch,
) -> RestoreSample:
    """Return the examples with the highest priorities per class, of sample and batch.

    Args:
      sample: [Ct, u, ...].
      task: says which classes these are.
      offered: of the batch, [batch, ...].
      priority: of the batch's examples, in [0, 1).
      batch: labels and indices of the examples.
    """
    classes, u = sample.priority.shape
    # each class has one row of candidates: the Ct u sampled entries, then the batch.
    # Those of other classes have priority -1
    same_class = jnp.eye(classes, dtype=bool)[:, :, None]
    sampled = jnp.where(same_class, sample.priority, -1.0).reshape(classes, classes * u)
    has_label = (task.classes[:, None] == batch.label) & offered.present
    candidates = jnp.concatenate([sampled, jnp.where(has_label, priority, -1.0)], axis=1)
    # where a class has fewer than u candidates, -1 is among the highest: an empty place
    highest, index = jax.lax.top_k(candidates, u)

    def pick(old: Array, new: Array) -> Array:
        return jnp.concatenate([old.reshape(classes * u, *old.shape[2:]), new])[index]

    restore = Restore(*map(pick, sample.restore, offered))
    restore = restore._replace(present=highest >= 0)
    return RestoreSample(restore, highest, pick(sample.index, batch.index))


def in_order(sample: RestoreSample) -> Restore:
    """Return the sample, with zeros in empty entries.

    A class with fewer than u examples has all of them, in the order of the data set.
    """
    present = sample.restore.present
    # a full class keeps the order of its draw
    is_full = jnp.all(present, axis=1, keepdims=True)
    empty_last = jnp.where(present, sample.index, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(jnp.where(is_full, 0, empty_last), axis=1, stable=True)

    def sort(leaf: Array) -> Array:
        index = order.reshape(*order.shape, *[1] * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, index, axis=1)

    sorted_present = sort(present)

    def sort_or_zero(leaf: Array) -> Array:
        mask = sorted_present.reshape(*sorted_present.shape, *[1] * (leaf.ndim - 2))
        return jnp.where(mask, sort(leaf), 0)

    latent = sort_or_zero(sample.restore.latent)
    order = sort_or_zero(sample.restore.order)
    return Restore(latent, order, sorted_present)


# ---- server: the restore pool and its images (section IV-D) ----------------------------


class RestorePool(NamedTuple):
    """The server's store of the clients' tokens."""

    restore: Restore
    """Each client's newest tokens of the current task, [K, Ct, u, ...]."""
    task: Int[Array, ""]
    """The current task; -1: none yet."""
    prompt: Float[Array, "T length width"] | None
    """The reconstructive prompt that each task ended with; None without prompts."""


def keep_tokens(options: PmaeOptions, run: Run, autoencoder: Autoencoder) -> ServerRule:
    """Keep the clients' tokens, and the averaged reconstructive prompt as the task's."""
    sizes = run.sizes

    def init(params: Params, _trainable: Params) -> RestorePool:
        def of_all_clients(leaf: Array) -> Array:
            return jnp.zeros((sizes.clients, *leaf.shape), leaf.dtype)

        of_client = no_restore(options, sizes, run.network, autoencoder)
        prompts = None
        if RECONSTRUCTION in params.extra:
            prompt = params.extra[RECONSTRUCTION]
            prompts = jnp.zeros((sizes.tasks, *prompt.shape))
        return RestorePool(jax.tree.map(of_all_clients, of_client), jnp.int32(-1), prompts)

    def update(round: ServerRound, params: Params, pool: RestorePool) -> ServerUpdate:
        task = round.task.index
        reported: Restore = round.reports[RESTORE]
        # tokens of an earlier task lie on the host by now (`ServerReplay`)
        present = pool.restore.present & (pool.task == task)
        restore = pool.restore._replace(present=present)
        # JAX drops writes beyond the last client: invalid participants change nothing
        client = jnp.where(round.valid, round.ids, sizes.clients)

        def store(old: Array, new: Array) -> Array:
            return old.at[client].set(new, mode="drop")

        restore = jax.tree.map(store, restore, reported)
        prompts = pool.prompt
        if prompts is not None:
            prompts = prompts.at[task].set(params.extra[RECONSTRUCTION])
        pool = RestorePool(restore, jnp.asarray(task, jnp.int32), prompts)
        images = jnp.sum(reported.present & round.valid[:, None, None])
        metrics = {"images": Weighted(images.astype(jnp.float32), jnp.ones(()))}
        return ServerUpdate(params, pool, metrics)

    reports = (restore_tokens(options, run, autoencoder),)
    return ServerRule(RESTORE, update, init, reports=reports)


def train_on_restored(options: PmaeOptions, learner: Learner) -> ServerReplay:
    """Train adapter and classifier on restored images by cross-entropy.

    Adam is new in every round.
    """
    # the learning rate may be traced (`federated/rates.py`), so it is applied below
    adam = optax.scale_by_adam()

    def start(
        round_context: RoundContext,
        server: ServerState,
    ) -> tuple[Params, optax.OptState]:
        trainable = learner.trainable(server.params, round_context.task)
        return trainable, adam.init(trainable)

    def step(
        round_context: RoundContext,
        server: ServerState,
        local: tuple[Params, optax.OptState],
        images: ReplayBatch,
        _key: PRNGKeyArray,
    ) -> tuple[tuple[Params, optax.OptState], Metrics]:
        trainable, optimiser = local
        frozen = round_context.frozen
        task = round_context.task
        batch = restored_batch(options, round_context, learner, pool_of(server), images)

        def loss_of(trainable: Params) -> tuple[Array, Array]:
            # the server's parameters of all tasks stand in for a client's cache of them
            output = learner.forward(frozen, server.params, trainable, batch, task, False)
            logits = output.logits
            return heads.cross_entropy(logits, batch.label, images.classes, batch.mask), logits

        (loss, logits), gradient = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        direction, optimiser = adam.update(gradient, optimiser, trainable)
        # scale_by_adam gives the direction without the sign and the rate
        trainable = jax.tree.map(lambda p, d: p - options.tune_lr * d, trainable, direction)
        count = jnp.sum(batch.mask).astype(jnp.float32)
        correct = heads.correct(logits, batch.label, images.classes, batch.mask)
        metrics = {"loss": Weighted(loss * count, count), "accuracy": Weighted(correct, count)}
        return (trainable, optimiser), metrics

    def finish(
        round_context: RoundContext,
        server: ServerState,
        local: tuple,
    ) -> ServerState:
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
    """Return the state of `keep_tokens`, the method's first server rule."""
    return server.rules[0]


class Stored(NamedTuple):
    """Tokens that restore images, and the positions of their patches."""

    latent: Float[Array, "N tokens width"]
    order: Int[Array, "N patches"]


def current_tokens(round_context: RoundContext, server: ServerState) -> ReplayBuffer:
    """Return the current task's part of the pool, image by image."""
    pool = pool_of(server)
    task = round_context.task

    def flat(leaf: Shaped[Array, "K Ct u *shape"]) -> Shaped[Array, "K*Ct*u *shape"]:
        return leaf.reshape(-1, *leaf.shape[3:])

    present = pool.restore.present & (pool.task == task.index)
    label = jnp.broadcast_to(task.classes[None, :, None], present.shape)
    stored = Stored(flat(pool.restore.latent), flat(pool.restore.order))
    return ReplayBuffer(stored, flat(label), flat(present))


def restore_plan(
    options: PmaeOptions,
    task: int,
    last: bool,
) -> tuple[tuple[int, int], ...]:
    """Return the pairs (task of images, task of prompt) that a round restores.

    In the last round of a task these are all tasks so far, in other rounds the current
    one (Algorithm 1). The release finds a task's uploads by the text of its number, so
    that those of tasks 10 to 19 are also restored with the prompt of task 1; so does
    `exact_task_match` off.
    """
    prompt_tasks = (task,)
    if last and not options.wo_restore_pool:
        prompt_tasks = tuple(range(task + 1))

    def matches(image_task: int, prompt_task: int) -> bool:
        if options.exact_task_match:
            return image_task == prompt_task
        # "1" is a prefix of "10" to "19": the release's file names match that way
        return str(image_task).startswith(str(prompt_task))

    return tuple(
        (image_task, prompt_task)
        for prompt_task in prompt_tasks
        for image_task in range(task + 1)
        if matches(image_task, prompt_task)
    )


def restored_batch(
    options: PmaeOptions,
    round_context: RoundContext,
    learner: Learner,
    pool: RestorePool,
    images: ReplayBatch,
) -> Batch:
    """Restore images with the prompts of their tasks, as the classifier's input."""
    autoencoder = autoencoder_of(learner.network)
    prompt = None
    if pool.prompt is not None:
        # one prompt per image; `images.task` is the task as whose image it is restored
        prompt = pool.prompt[images.task]
    image = restored(autoencoder, round_context.frozen, images.examples, prompt)
    # the decoder's pixel range may differ from that of the classifier's network
    if options.recon_denorm:
        image = between(autoencoder, learner.network, image)
    # restored images are no examples of the training set: index -1
    no_index = jnp.zeros_like(images.label) - 1
    return Batch(image, images.label, images.mask, no_index)


def restored(
    autoencoder: Autoencoder,
    frozen: Frozen,
    stored: Stored,
    prompt: Float[Array, "..."] | None,
) -> Float[Array, "batch h w 3"]:
    """Restore images in the autoencoder's pixel range, neither clipped nor pasted."""
    patches = autoencoder.decode(frozen.decoder, stored.latent, stored.order, prompt)
    return mae.unpatchify(patches, autoencoder.patch)


def reconstruct(
    options: PmaeOptions,
    network: Network,
    round_context: RoundContext,
    server: ServerState,
    image: Float[Array, "batch h w 3"],
    key: PRNGKeyArray,
) -> Reconstruction:
    """Restore images as the server would if clients sent their tokens, for figures.

    Args:
      options: mask ratio.
      network: with an autoencoder.
      round_context: for the frozen parameters.
      server: its reconstructive prompt is the newest one.
      image: as the network reads it.
      key: of the masks.
    """
    autoencoder = autoencoder_of(network)
    image = between(network, autoencoder, image)
    masking = mae.random_mask(key, len(image), autoencoder.patches, options.mask_ratio)

    def pixels(prompt: Array | None) -> Float[Array, "batch h w 3"]:
        patches = reconstructed(autoencoder, round_context.frozen, image, masking, prompt)
        return to_unit(autoencoder, mae.unpatchify(patches, autoencoder.patch))

    unprompted = pixels(None)
    prompted = unprompted
    if RECONSTRUCTION in server.params.extra:
        prompted = pixels(server.params.extra[RECONSTRUCTION])
    original = to_unit(autoencoder, image)
    hidden = mae.hidden_pixels(masking.masked, autoencoder.patch)
    # the figure shows hidden patches in grey
    grey = jnp.where(hidden, 0.5, original)
    return Reconstruction(original, grey, unprompted, prompted, hidden)
