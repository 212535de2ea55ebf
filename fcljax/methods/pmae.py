"""pMAE: prompting of masked autoencoders for federated continual learning (He et al. 2024, arXiv 2411.01916).

A masked autoencoder is frozen. Clients train discriminative prompts and a classifier on whole images, and, by
rebuilding images of which three quarters are hidden, a reconstructive prompt for the decoder. Besides their
parameters they upload what the encoder says of the visible patches of a few images of each class. The server
averages, rebuilds images from that with the prompt of their task, and goes on training prompts and classifier
on them: on those of the current task, and when a task ends on those of all tasks, which it keeps.

The discriminative side may be any adapter; pMAE's own is `vpt`. What the server keeps of earlier tasks lies
on the host (`federated/rehearsal.py`), and images are rebuilt a batch at a time and not kept. Where paper
and release differ, a field of `PmaeOptions` says which one is meant.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from fcljax.errors import InputError
from fcljax.methods.fedavg import averaging
from fcljax.models.mae import Masking, hidden_pixels, random_mask, reconstruction_loss, unpatchify
from fcljax.options import option
from fcljax.parts.federate import Collect, Rehearse, Run, Seen, ServerStep, Slots, Term, Train
from fcljax.parts.learner import Learner, Model
from fcljax.pixels import between, to_unit
from fcljax.settings import Preset
from fcljax.types import (
    Aggregate,
    Autoencoder,
    Batch,
    ClientContext,
    Frozen,
    Method,
    Network,
    ReplayBatch,
    ReplayBuffer,
    Restored,
    RoundContext,
    Sizes,
    Task,
    View,
    Weighted,
)

RECONSTRUCTION, RESTORE = "reconstruction", "restore"  # names of the term and of the server step


@dataclasses.dataclass(frozen=True)
class PmaeOptions:
    """Options of pMAE; the values are the release's."""

    mask_ratio: float = option(0.75, most=0.99)
    """Share of the patches that is masked."""
    recon_length: int = 5
    """Tokens of the reconstructive prompt."""
    recon_weight: float = 1.0
    """Weight lambda of the reconstruction in the clients' loss."""
    restore_images: int = 4
    """Images u of each class for which a client uploads what restores them."""
    tune_epochs: int = option(5, least=0)
    """Epochs of the server on restored images."""
    tune_batch: int = 128
    """Restored images per step of the server."""
    tune_lr: float = option(1e-3, positive=True)
    """Learning rate of the server's Adam."""
    recon_denorm: bool = True
    """Map restored images from the decoder's range of pixels to the classifier's."""
    exact_task_match: bool = True
    """Restore a task's images with its own prompt alone, not also with those of tasks whose number starts
    with its number."""
    wo_recon_prompt: bool = False
    """Ablation: the decoder gets no prompt."""
    wo_restore_pool: bool = False
    """Ablation: restore the current task's images only."""


PRESETS = {
    "intended": Preset(PmaeOptions()),
    "paper": Preset(PmaeOptions(recon_denorm=False)),
    "released": Preset(PmaeOptions(recon_denorm=False, exact_task_match=False)),
}


def pmae(options: PmaeOptions, run: Run) -> Method:
    """pMAE as a method, on any adapter. `options` must be resolved.

    Raises:
      InputError: for a network without a decoder.
    """
    pair = autoencoder_of(run.network)
    tune = Train(options.tune_epochs, options.tune_batch, options.tune_lr)
    rehearse = Rehearse(
        RESTORE, kept_now, functools.partial(plan, options), functools.partial(restored_batch, options), tune
    )
    terms = () if options.wo_recon_prompt else (reconstruction(options, pair),)
    return averaging(
        run,
        terms=terms,
        steps=(restore(options, run, pair),),
        rehearse=rehearse,
        restores=functools.partial(give_away, options, run.network),
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


def reconstruction(options: PmaeOptions, pair: Autoencoder) -> Term:
    """lambda times the mean squared error of hidden patches, under the reconstructive prompt, which trains
    and travels. No other parameter has a gradient of it: the encoder sees no prompts."""

    def loss(learner: Learner, seen: Seen, memory: tuple) -> Float[Array, ""]:
        del memory
        image = between(learner.network, pair, seen.batch.image)
        masking = random_mask(row_keys(seen, 0), len(image), pair.patches, options.mask_ratio)
        patches = rebuilt(pair, seen.context.frozen, image, masking, seen.part.extra[RECONSTRUCTION])
        return options.recon_weight * reconstruction_loss(patches, image, masking.masked, seen.batch.mask)

    def init(key: PRNGKeyArray) -> Float[Array, "length width"]:
        return jax.random.uniform(key, (options.recon_length, pair.width), minval=-1.0, maxval=1.0)

    return Term(RECONSTRUCTION, loss, slots=Slots(init))


def row_keys(seen: Seen, purpose: int) -> Key[Array, " batch"]:
    """A key for every row of the batch: what is drawn belongs to the row, not to the client that has it."""
    assert seen.batch.keys is not None
    return jax.vmap(jax.random.fold_in, (0, None))(seen.batch.keys, purpose)


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


# ---- client: restore information (section IV-C) ------------------------------------------------------------


class Restore(NamedTuple):
    """From which images are restored, u of each of the task's classes: the encoder's tokens, where the
    patches belong, and which places are taken."""

    latent: Float[Array, "*clients Ct u tokens width"]
    order: Int[Array, "*clients Ct u patches"]
    present: Bool[Array, "*clients Ct u"]


class Drawn(NamedTuple):
    """The choice so far: rows with the highest lots of each class."""

    restore: Restore
    lot: Float[Array, "Ct u"]  # -1: no row yet
    row: Int[Array, "Ct u"]


def restore_information(options: PmaeOptions, run: Run, pair: Autoencoder) -> Collect:
    """u rows of each class at random, all if there are fewer, encoded without prompts under a random mask, in
    a pass over the client's rows under the clean view (specification 3.4)."""
    wanted = options.restore_images
    view = View(1, run.train.batch_size, shuffle=False, augment=False)

    def init(context: ClientContext) -> Drawn:
        del context
        restore = no_restore(options, run.sizes, run.network, pair)
        return Drawn(
            restore, jnp.full(restore.present.shape, -1.0), jnp.zeros(restore.present.shape, jnp.int32)
        )

    def look(learner: Learner, seen: Seen, drawn: Drawn) -> Drawn:
        batch = seen.batch
        image = between(learner.network, pair, batch.image)
        masking = random_mask(row_keys(seen, 0), len(image), pair.patches, options.mask_ratio)
        latent = pair.encode(seen.context.frozen.network, image, masking.keep)
        lot = jax.vmap(jax.random.uniform)(row_keys(seen, 1))
        more = Restore(latent, masking.restore, batch.mask)
        return draw_lots(drawn, seen.context.task, more, lot, batch.label, batch.index, wanted)

    def close(context: ClientContext, drawn: Drawn) -> Restore:
        del context
        return in_order(drawn)

    return Collect(RESTORE, init, look, close, view)


def no_restore(options: PmaeOptions, sizes: Sizes, network: Network, pair: Autoencoder) -> Restore:
    """Places for u images of each of a task's classes, none of them taken."""
    kept = int(pair.patches * (1 - options.mask_ratio))
    place = (sizes.task_classes, options.restore_images)
    latent = jnp.zeros((*place, 1 + kept, network.width))
    return Restore(latent, jnp.zeros((*place, pair.patches), jnp.int32), jnp.zeros(place, bool))


def draw_lots(
    drawn: Drawn,
    task: Task,
    more: Restore,
    lot: Float[Array, " batch"],
    label: Int[Array, " batch"],
    row: Int[Array, " batch"],
    wanted: int,
) -> Drawn:
    """The rows with the highest lots of each class, of those so far and a batch [batch, ...]."""
    classes, u = drawn.lot.shape
    mine = (task.classes[:, None] == label) & more.present
    own = jnp.where(jnp.eye(classes, dtype=bool)[:, :, None], drawn.lot, -1.0).reshape(classes, classes * u)
    every = jnp.concatenate([own, jnp.where(mine, lot, -1.0)], axis=1)  # [Ct, Ct * u + batch]
    best, place = jax.lax.top_k(every, wanted)
    flat = lambda old, new: jnp.concatenate([old.reshape(classes * u, *old.shape[2:]), new])
    pick = lambda old, new: flat(old, new)[place]
    restore = Restore(*map(pick, drawn.restore, more))
    return Drawn(restore._replace(present=best >= 0), best, pick(drawn.row, row))


def in_order(drawn: Drawn) -> Restore:
    """What was drawn; where there are no more rows than wanted, in the order of the data set. Places that are
    not taken hold zeros."""
    present = drawn.restore.present
    full = jnp.all(present, axis=1, keepdims=True)
    last = jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(full, 0, jnp.where(present, drawn.row, last)), axis=1, stable=True)
    sort = lambda x: jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1)
    taken = sort(present)
    keep = lambda x: jnp.where(taken.reshape(*taken.shape, *[1] * (x.ndim - 2)), sort(x), 0)
    return Restore(keep(drawn.restore.latent), keep(drawn.restore.order), taken)


# ---- server: the restore pool and its images (section IV-D) ------------------------------------------------


class RestorePool(NamedTuple):
    """What the clients have uploaded in the current task, each one's newest; that task (-1: none yet); and
    the reconstructive prompt that each task ended with, None without prompts."""

    restore: Restore  # [K, Ct, u, ...]
    task: Int[Array, ""]
    prompt: Float[Array, "T length width"] | None


def restore(options: PmaeOptions, run: Run, pair: Autoencoder) -> ServerStep:
    """The server's part of the pool, with the averaged reconstructive prompt as the task's."""
    sizes = run.sizes

    def init(params: Model, part: Model) -> RestorePool:
        del part
        none = no_restore(options, sizes, run.network, pair)
        every = jax.tree.map(lambda x: jnp.zeros((sizes.clients, *x.shape), x.dtype), none)
        prompt = params.extra.get(RECONSTRUCTION)
        prompts = None if prompt is None else jnp.zeros((sizes.tasks, *prompt.shape))
        return RestorePool(every, jnp.int32(-1), prompts)

    def step(
        round_context: RoundContext,
        learner: Learner,
        params: Model,
        pool: RestorePool,
        aggregate: Aggregate,
        key: Array,
    ):
        del learner, key
        index, arrived = round_context.task.index, aggregate.gather[RESTORE]
        kept = pool.restore._replace(present=pool.restore.present & (pool.task == index))
        place = jnp.where(aggregate.valid, aggregate.id, sizes.clients)
        kept = jax.tree.map(lambda old, new: old.at[place].set(new, mode="drop"), kept, arrived)
        own, prompts = params.extra.get(RECONSTRUCTION), pool.prompt
        prompts = None if own is None or prompts is None else prompts.at[index].set(own)
        sent = jnp.sum(arrived.present & aggregate.valid[:, None, None])
        images = Weighted(sent.astype(jnp.float32), jnp.ones(()))
        return params, RestorePool(kept, jnp.asarray(index, jnp.int32), prompts), {"images": images}

    collect = restore_information(options, run, pair)
    # it merges nothing that any rule would merge
    return ServerStep(RESTORE, step, init, collects=(collect,), follows_rule=True)


class Stored(NamedTuple):
    """From which one image is restored, as the pool keeps it: [N, ...]."""

    latent: Float[Array, "N tokens width"]
    order: Int[Array, "N patches"]


def kept_now(round_context: RoundContext, pool: RestorePool) -> ReplayBuffer:
    """The current task's part of the pool, image by image."""
    flat = lambda x: x.reshape(-1, *x.shape[3:])
    present = pool.restore.present & (pool.task == round_context.task.index)
    label = jnp.broadcast_to(round_context.task.classes[None, :, None], present.shape)
    return ReplayBuffer(
        Stored(flat(pool.restore.latent), flat(pool.restore.order)), flat(label), flat(present)
    )


def plan(options: PmaeOptions, task: int, last: bool) -> tuple[tuple[int, int], ...]:
    """Whose images the server restores in a round of a task, and with whose prompt: in its last round those
    of all tasks so far, else its own (Algorithm 1).

    The release finds a task's uploads by the text of its number, so that those of tasks 10 to 19 are restored
    with the prompt of task 1 too; `exact_task_match` off does that.
    """
    wanted = range(task + 1) if last and not options.wo_restore_pool else (task,)
    loose = not options.exact_task_match
    found = lambda of: (i for i in range(task + 1) if i == of or (loose and str(i).startswith(str(of))))
    return tuple((source, of) for of in wanted for source in found(of))


def restored_batch(
    options: PmaeOptions, round_context: RoundContext, learner: Learner, pool: RestorePool, rows: ReplayBatch
) -> Batch:
    """Images rebuilt with the prompts of their tasks, as the classifier's input."""
    pair = autoencoder_of(learner.network)
    prompt = None if pool.prompt is None else pool.prompt[rows.task]
    image = restored(pair, round_context.frozen, rows.rows, prompt)
    if options.recon_denorm:
        image = between(pair, learner.network, image)
    return Batch(image, rows.label, rows.mask, jnp.zeros_like(rows.label) - 1)


def restored(
    pair: Autoencoder, frozen: Frozen, stored: Stored, prompt: Float[Array, "..."] | None
) -> Float[Array, "batch h w 3"]:
    """Images from what the pool keeps, in the pair's own range of pixels, neither clipped nor pasted."""
    return unpatchify(pair.decode(frozen.decoder, stored.latent, stored.order, prompt), pair.patch)


def give_away(
    options: PmaeOptions,
    network: Network,
    round_context: RoundContext,
    params: Model,
    image: Float[Array, "batch h w 3"],
    key: PRNGKeyArray,
) -> Restored:
    """What the server could rebuild of images, given as the network's input, if a client sent theirs."""
    pair, frozen = autoencoder_of(network), round_context.frozen
    own = between(network, pair, image)
    masking = random_mask(key, len(image), pair.patches, options.mask_ratio)
    pixels = lambda prompt: to_unit(pair, unpatchify(rebuilt(pair, frozen, own, masking, prompt), pair.patch))
    plain = pixels(None)
    prompt = params.extra.get(RECONSTRUCTION)
    original = to_unit(pair, own)
    hidden = hidden_pixels(masking.masked, pair.patch)
    masked = jnp.where(hidden, 0.5, original)
    return Restored(original, masked, plain, plain if prompt is None else pixels(prompt), hidden)
