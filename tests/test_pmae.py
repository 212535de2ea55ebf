"""pMAE: reconstruction, what clients upload of images, the restore pool and the server's training on it."""

import functools

import jax
import jax.numpy as jnp
import micro
import numpy as np
import optax
import pytest
import toys
from micro import IMAGE, KEY, LABEL, PARTITIONS, SIZES, TASKS, resolved
from toys import close, same

from fcljax import config
from fcljax.adapters import find_adapter
from fcljax.data.tasks import make_tasks
from fcljax.errors import InputError
from fcljax.federated import communication
from fcljax.federated.engine import RoundInputs, run_round
from fcljax.federated.server_replay import make_replayer, replay_on_server
from fcljax.methods import pmae
from fcljax.methods.pmae import PmaeOptions, Restore, RestoreSample, draw_examples, in_order, restore_plan
from fcljax.models.heads import cross_entropy
from fcljax.models.mae import (
    DecoderConfig,
    autoencoder,
    decoder_shapes,
    patchify,
    random_mask,
    reconstruction_loss,
    unpatchify,
)
from fcljax.models.shapes import VITS
from fcljax.models.vit import parameter_shapes, vit_network
from fcljax.parts.classifiers import linear
from fcljax.parts.learner import Params, learner
from fcljax.pixels import NORMALISE, between
from fcljax.runs import checkpoint
from fcljax.runs import reconstructions as restored
from fcljax.runs.build import make_method
from fcljax.types import Autoencoder, Features, Frozen, Network, Reconstruction, ReplayBuffer, Sizes

# ---- a masked autoencoder of a few lines: images of 2 x 2 pixels, which are its patches --------------------


def _encode(params, image, keep):
    """Patches with a place of their own, and their mean for a class token."""
    x = jnp.tanh(patchify(image, 1) @ params["kernel"] + params["place"])
    x = jnp.take_along_axis(x, keep[..., None], axis=1)
    return jnp.concatenate([x.mean(axis=1, keepdims=True), x], axis=1)


def _decode(decoder, latent, restore, prompt):
    """Every patch knows its own token, if there is one, the others' mean, and the prompt."""
    x = latent @ decoder["embed"]
    hidden = jnp.broadcast_to(decoder["mask"], (len(x), restore.shape[1] + 1 - x.shape[1], x.shape[2]))
    patches = jnp.take_along_axis(jnp.concatenate([x[:, 1:], hidden], axis=1), restore[..., None], axis=1)
    said = 0.0 if prompt is None else prompt.mean(axis=-2).reshape(-1, 1, x.shape[2])
    return jnp.tanh(patches + x[:, :1] + said) @ decoder["predict"]


def _apply(params, image, injection, train, mask=None):
    """The class token, moved by the prompts of all blocks."""
    cls = _encode(params, image, jnp.broadcast_to(jnp.arange(4), (len(image), 4)))[:, 0]
    moved = sum(prompt.mean(axis=-2) for prompt in injection.prompt.values()) if injection else 0.0
    return Features(jnp.tanh(2 * cls + moved), None, {}), params


DEPTH = 6  # width of the encoder's tokens
PAIR = Autoencoder(_encode, _decode, 1, 4, 5, (0.5,) * 3, (0.25,) * 3)
NETWORK = Network(lambda key: {}, _apply, DEPTH, 2, (2, 2, 3), autoencoder=PAIR)
_draw = np.random.default_rng(7).normal
FROZEN = jax.tree.map(
    lambda shape: jnp.asarray(_draw(size=shape), jnp.float32),
    Frozen(
        {"kernel": (3, DEPTH), "place": (4, DEPTH)}, {"embed": (DEPTH, 5), "mask": (5,), "predict": (5, 3)}
    ),
    is_leaf=lambda x: isinstance(x, tuple) and all(isinstance(n, int) for n in x) and x != (),
)
DATA = toys.Examples(jnp.asarray(IMAGE[:, ::4, ::4], jnp.float32), jnp.asarray(LABEL, jnp.int32))

begin = functools.partial(micro.begin, frozen=FROZEN)
engine_of = functools.partial(micro.engine_of, frozen=FROZEN, data=DATA)
method_of = functools.partial(micro.method_of, network=NETWORK)
play = functools.partial(micro.play, data=DATA, frozen=FROZEN)
receive = functools.partial(micro.receive, frozen=FROZEN, data=DATA)
round_context_of = functools.partial(micro.round_context_of, frozen=FROZEN)
VALUES = {
    "vpt_length": 2,
    "vpt_blocks": 2,
    "restore_images": 2,
    "recon_length": 2,
    "tune_epochs": 1,
    "tune_batch": 8,
    "mask_ratio": 0.5,
}
NAME = pmae.RECONSTRUCTION


def options_of(**values):
    return config.part(PmaeOptions, resolved("pmae", **{**VALUES, **values}))


@functools.cache
def history(**values):
    """(server, states, report) after each of the four rounds of two tasks."""
    method = method_of("pmae", **{**VALUES, **values})
    return play(engine_of(method), *begin(method))


def prompt_of(server):
    return server.params.extra[NAME]


# ---- counts (specification 9) ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "expected"), [("pmae", 233_160), ("l2p-pmae", 199_880 + 2_560)])
def test_what_trains_and_what_is_uploaded_have_the_numbers_of_the_paper(name, expected):
    sizes, vit, decoder = Sizes(200, 20, 10, 10), VITS["vit_b16"], DecoderConfig()
    network = vit_network(vit, autoencoder=autoencoder(vit, decoder))
    method = make_method(resolved(name), sizes, network)
    frozen = Frozen(parameter_shapes(vit), decoder_shapes(decoder))
    server = jax.eval_shape(method.init, KEY, frozen)
    task = round_context_of(make_tasks(200, 20)[0])
    part = jax.eval_shape(lambda server: method.broadcast(task, server).payload.trainable, server)
    assert communication.count_scalars(part) == expected
    kept = jax.eval_shape(method.server_replay.buffer, task, server)
    # 40 images of a client; 38,400 numbers and 196 places each, more than the image's 150,528 bytes
    assert len(kept.label) == 10 * 40 and kept.examples.latent.shape[1:] == (50, 768)
    assert communication.count_scalars(kept.examples.latent) // 400 == 38_400 and kept.examples.order.shape[
        1:
    ] == (196,)
    assert communication.num_bytes(kept.examples) // 400 > 3 * 224**2


# ---- the two ranges of pixels (oracle 4) -------------------------------------------------------------------


def test_pixels_go_from_one_networks_range_to_the_others():
    space = lambda name: Network(lambda key: (), lambda *_: None, 1, 1, (1, 1, 3), *NORMALISE[name])
    unit, imagenet = space("unit"), space("imagenet")
    grey = jnp.full((1, 1, 1, 3), 0.5)
    assert float(between(unit, imagenet, grey)[0, 0, 0, 0]) == pytest.approx(0.065502, abs=1e-6)
    np.testing.assert_allclose(between(imagenet, unit, between(unit, imagenet, grey)), 0.5, atol=1e-6)
    assert between(unit, unit, grey) is grey


@pytest.mark.parametrize("denorm", [True, False])
@pytest.mark.long
def test_restored_images_reach_the_classifier_in_its_range_or_in_the_decoders(denorm):
    options = options_of(recon_denorm=denorm)
    server = history()[1][0]
    made, round_context = method_of("pmae", **VALUES), round_context_of(TASKS[0])
    kept = made.server_replay.buffer(round_context, server)
    rows = jax.tree.map(lambda x: x[:4], kept.examples)
    some = pmae.ReplayBatch(
        rows, kept.label[:4], jnp.zeros(4, jnp.int32), jnp.ones(4, bool), TASKS[0].current
    )
    model = learner(NETWORK, find_adapter("vpt").build(adapter_options(), SIZES, NETWORK), linear(DEPTH, 5))
    batch = pmae.restored_batch(options, round_context, model, server.rules[0], some)
    prompt = server.rules[0].prompt[0]
    patches = PAIR.decode(FROZEN.decoder, rows.latent, rows.order, prompt)
    pixels = unpatchify(patches, 1)
    # the decoder's range has mean 0.5 and deviation 0.25, the network's 0 and 1
    np.testing.assert_allclose(batch.input, pixels * 0.25 + 0.5 if denorm else pixels, atol=1e-5)


def adapter_options():
    return config.part(find_adapter("vpt").options, resolved("pmae", **VALUES))


def test_a_network_without_a_decoder_is_refused_by_name():
    with pytest.raises(InputError, match="decoder: the network has none"):
        method_of("pmae", network=NETWORK._replace(autoencoder=None), **VALUES)


# ---- the client: reconstruction ----------------------------------------------------------------------------


def one_client(**values):
    """What client 0 of the first task uploads in one epoch of one batch, and the server before it."""
    method = method_of("pmae", epochs=1, batch_size=16, lr=1e-2, **{**VALUES, **values})
    server, states = begin(method)
    found, _ = receive(engine_of(method), 0, server, states, PARTITIONS[0], [0], TASKS[0])
    return server, found


@pytest.mark.long
def test_the_reconstructive_prompt_follows_the_error_of_hidden_patches_and_nothing_else_does():
    server, found = one_client()
    moved = jax.tree.map(lambda x: x / found.weight[0], found.mean)
    _, without = one_client(recon_weight=0.0)
    same(found.mean.adapter, without.mean.adapter)
    same(found.mean.classifier, without.mean.classifier)
    still = without.mean.extra[NAME] / found.weight[0]
    np.testing.assert_allclose(still, prompt_of(server), rtol=1e-6)  # weight 0 is no reconstruction
    # Adam's first step goes by the learning rate against the sign of the gradient, whatever its length
    step = np.asarray(moved.extra[NAME] - prompt_of(server))
    assert np.mean(np.isclose(np.abs(step), 1e-2, rtol=1e-2)) > 0.9


@pytest.mark.long
def test_the_first_step_is_against_the_gradient_of_the_written_out_loss():
    """The masks are drawn with the keys that a batch has for its rows."""
    method = method_of("pmae", **VALUES)
    server, _ = begin(method)
    rows = np.flatnonzero(DATA.label == 0)[:4]
    keys = jax.random.split(KEY, 4)
    batch = pmae.Batch(DATA.input[rows], DATA.label[rows], jnp.array([1, 1, 1, 0], bool), jnp.array(rows))
    batch = batch._replace(keys=keys)
    model = learner(NETWORK, find_adapter("vpt").build(adapter_options(), SIZES, NETWORK), linear(DEPTH, 5))
    rule = pmae.reconstruction(options_of(recon_weight=3.0), PAIR)

    def ours(prompt):
        part = Params((), (), {NAME: prompt})
        context = pmae.ClientContext(FROZEN, (), (), TASKS[0], ())
        return rule.loss(pmae.ClientStep(model, context, part, None, batch, KEY, part), ())

    def written(prompt):
        own = jax.vmap(jax.random.fold_in, (0, None))(keys, 0)
        masking = random_mask(own, 4, 4, 0.5)
        image = (batch.input - 0.5) / 0.25
        latent = PAIR.encode(FROZEN.network, image, masking.keep)
        error = PAIR.decode(FROZEN.decoder, latent, masking.restore, prompt)
        patches = image.reshape(4, 4, 3)
        each = jnp.mean((error - patches) ** 2, axis=-1) * masking.masked
        return 3 * jnp.sum(each[:3]) / jnp.sum(masking.masked[:3])

    prompt = prompt_of(server)
    (loss, gradient), expected = (jax.jit(jax.value_and_grad(each))(prompt) for each in (ours, written))
    assert float(loss) == pytest.approx(float(expected[0]), rel=1e-5)
    np.testing.assert_allclose(gradient, expected[1], atol=1e-5)


@pytest.mark.long
def test_the_prompt_learns_to_rebuild():
    """After four rounds the error on images that nobody trained on is lower with the prompt than with the one
    that the run began with."""
    first, last = begin(method_of("pmae", **VALUES))[0], history(lr=0.05, epochs=8)[-1][0]
    image = between(NETWORK, PAIR, DATA.input)
    masking = random_mask(KEY, len(image), 4, 0.5)
    error = lambda prompt: float(
        reconstruction_loss(pmae.reconstructed(PAIR, FROZEN, image, masking, prompt), image, masking.masked)
    )
    assert error(prompt_of(last)) < 0.99 * error(prompt_of(first))


def test_the_prompt_is_averaged_by_rows():
    """Oracle 11: 30 rows with 0 and 10 with 4 are 1."""
    mean = communication_mean(jnp.array([0.0, 4.0]), jnp.array([30.0, 10.0]))
    assert float(mean) == 1.0


def communication_mean(values, weight):
    from fcljax.federated.rules import weighted_mean

    return weighted_mean(values, weight, jnp.ones(2, bool))


@pytest.mark.long
def test_without_the_reconstructive_prompt_there_is_none():
    """Oracle 17: the ablation is honoured: nothing of it trains or travels, and images are rebuilt all the
    same."""
    method = method_of("pmae", wo_recon_prompt=True, **VALUES)
    server, states = begin(method)
    assert server.params.extra == {} and server.rules[0].prompt is None
    after = play(engine_of(method), server, states, rounds=1)
    assert set(method.trainable(round_context_of(TASKS[0]), server)) == {"adapter", "classifier"}
    assert after[-1][2].metrics["replay_examples"] > 0


# ---- the client: what it uploads of images -----------------------------------------------------------------


def drawn(lots, rows, labels=None, wanted=4, tasks=TASKS[0]):
    """The choice from one batch after the other; `latent` is the row's number."""
    place = (3, wanted)
    none = Restore(jnp.zeros((*place, 1, 1)), jnp.zeros((*place, 2), jnp.int32), jnp.zeros(place, bool))
    state = RestoreSample(none, jnp.full(place, -1.0), jnp.zeros(place, jnp.int32))
    for lot, row in zip(lots, rows, strict=True):
        count = len(row)
        label = jnp.zeros(count, jnp.int32) if labels is None else jnp.array(labels)
        more = Restore(
            jnp.array(row, jnp.float32)[:, None, None], jnp.zeros((count, 2), jnp.int32), jnp.array(row) >= 0
        )
        batch = pmae.Batch(jnp.zeros((count, 2, 2, 3)), label, more.present, jnp.array(row))
        state = draw_examples(state, tasks, more, jnp.array(lot), batch)
    return in_order(state)


@pytest.mark.long
def test_all_rows_of_a_class_that_has_few_go_up_in_their_order_and_of_many_as_many_as_are_wanted():
    """Oracle 7, over batches with padding."""
    few = drawn([[0.1, 0.9, 0.5, 0.7]], [[7, 2, 5, -1]])
    assert few.present[0].tolist() == [True] * 3 + [False] and not few.present[1:].any()
    assert few.latent[0, :, 0, 0].tolist() == [2, 5, 7, 0]
    lots = [[0.1, 0.9, 0.5, 0.7], [0.2, 0.8, 0.6, 0.3]]
    many = drawn(lots, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert many.present[0].all() and many.latent[0, :, 0, 0].tolist() == [1, 5, 3, 6]
    # four of four, in the order of the lots
    assert drawn([[0.1, 0.9, 0.5, 0.7]], [[0, 1, 2, 3]]).latent[0, :, 0, 0].tolist() == [1, 3, 2, 0]


def test_a_row_goes_to_its_class():
    found = drawn([[0.1, 0.2, 0.3, 0.4]], [[10, 11, 12, 13]], labels=[2, 0, 2, 4], wanted=2)
    assert found.latent[:, :, 0, 0].tolist() == [[11, 0], [0, 0], [12, 10]]


@pytest.mark.long
def test_a_client_uploads_what_the_encoder_says_of_its_own_rows_and_nothing_of_a_class_that_it_lacks():
    _, found = one_client()
    sent = jax.tree.map(lambda x: np.asarray(x[0]), found.gather[pmae.RESTORE])
    rows = PARTITIONS[0].indices[: PARTITIONS[0].count[0]]
    counts = np.bincount(DATA.label[rows], minlength=5)[:3]
    assert sent.present.sum(axis=1).tolist() == np.minimum(counts, 2).tolist()
    assert not sent.latent[~sent.present].any() and not sent.order[~sent.present].any()
    image = between(NETWORK, PAIR, DATA.input[rows])
    for c, u in np.argwhere(sent.present):
        keep = np.argsort(sent.order[c, u])[:2]  # the places of the two visible patches
        own = image[np.asarray(DATA.label[rows]) == c]
        latent = PAIR.encode(FROZEN.network, own, jnp.broadcast_to(keep, (len(own), 2)))
        apart = np.abs(np.asarray(latent) - sent.latent[c, u]).max(axis=(1, 2))
        assert apart.min() < 1e-4


@pytest.mark.long
def test_a_client_that_lacks_a_class_sends_no_image_of_it():
    """Client 2 has four rows of three classes; take one of them away."""
    rows = PARTITIONS[0].indices
    first = rows[PARTITIONS[0].offset[2] :][: PARTITIONS[0].count[2]]
    lacking = first[np.asarray(DATA.label[first]) != 1]
    from toys import make_partition

    partition = make_partition([lacking, [], [], []], np.asarray(DATA.label), SIZES.classes)
    method = method_of("pmae", **VALUES)
    server, states = begin(method)
    found, _ = receive(
        engine_of(method, partitions=[*PARTITIONS, partition]), 0, server, states, partition, [0], TASKS[0]
    )
    sent = found.gather[pmae.RESTORE]
    assert (
        not sent.present[0, 1].any() and sent.present[0, 0].any() and not np.asarray(sent.latent[0, 1]).any()
    )


# ---- the server: where a task's classes start --------------------------------------------------------------


@pytest.mark.parametrize("name", ["pmae", "hepco"])
@pytest.mark.long
def test_headtune_starts_a_tasks_classes_at_the_mean_features_of_all_clients(name):
    without_vpt = {key: x for key, x in VALUES.items() if not key.startswith("vpt")}
    own = without_vpt if name == "pmae" else {}
    method = method_of(name, **own, adapter="linear", fidelity="improved")
    (before, states), partition, task = begin(method), PARTITIONS[0], TASKS[0]
    ids = np.flatnonzero(partition.count)
    inputs = RoundInputs(FROZEN, DATA, partition, ids, task, 0, KEY, "task_start")
    after, _, _ = run_round(engine_of(method), jax.tree.map(jnp.copy, before), states, inputs)
    held = np.concatenate([partition.indices[partition.offset[k] :][: partition.count[k]] for k in ids])
    feature = _apply(FROZEN.network, DATA.input[held], None, False)[0].cls
    feature = np.tile(feature, 2 if name == "hepco" else 1)  # the frozen network's, and those of the adapter
    means = np.stack([np.asarray(feature)[LABEL[held] == c].mean(0) for c in range(3)])
    head = after.params.classifier
    close(head.kernel[:, :3].T, means / np.linalg.norm(means, axis=1, keepdims=True), 1e-5)
    assert not head.bias[:3].any()
    same(head.kernel[:, 3:], before.params.classifier.kernel[:, 3:])
    same(after.params.adapter, before.params.adapter)


# ---- the server: the pool ----------------------------------------------------------------------------------


@pytest.mark.long
def test_the_pool_has_each_clients_newest_upload_of_the_task_and_the_prompts_of_all_tasks():
    servers = [server for server, _, _ in history()]
    first, second, third = (server.rules[0] for server in servers[:3])
    present = np.asarray(first.restore.present)
    assert present[0].any() and not present[1].any() and first.task == 0 and third.task == 1
    assert np.abs(np.asarray(first.restore.latent - second.restore.latent)).max() > 0  # drawn anew
    np.testing.assert_array_equal(second.prompt[0], prompt_of(servers[1]))
    np.testing.assert_array_equal(third.prompt[0], prompt_of(servers[1]))  # stays when the task is over
    assert not np.asarray(second.prompt[1]).any() and np.asarray(third.prompt[1]).any()


@pytest.mark.long
def test_who_does_not_take_part_keeps_its_place_in_the_pool():
    method = method_of("pmae", **VALUES)
    server, states = begin(method)
    engine = engine_of(method)
    both = play(engine, server, states, rounds=1)[0][0].rules[0]
    later = play(engine, server, states, ids=[0, 2, 3], rounds=2)[1][0].rules[0]
    assert both.restore.present.shape == later.restore.present.shape
    from fcljax.federated.engine import RoundInputs, run_round

    inputs = RoundInputs(FROZEN, DATA, PARTITIONS[0], np.array([0]), TASKS[0], 1, jax.random.key(3))
    after, _, _ = run_round(engine, both_server(engine, server, states), states, inputs)
    pool = after.rules[0].restore
    same(pool.latent[2], both.restore.latent[2])
    assert np.abs(np.asarray(pool.latent[0] - both.restore.latent[0])).max() > 0


def both_server(engine, server, states):
    return play(engine, server, states, rounds=1)[0][0]


@pytest.mark.parametrize(
    ("task", "last", "values", "expected"),
    [
        (0, False, {}, [(0, 0)]),
        (1, True, {}, [(0, 0), (1, 1)]),
        (1, False, {}, [(1, 1)]),
        (2, True, {"wo_restore_pool": True}, [(2, 2)]),
        (12, False, {"exact_task_match": False}, [(12, 12)]),
    ],
)
def test_whose_images_are_restored(task, last, values, expected):
    """Oracle 8: all tasks in the last round of one, else its own."""
    assert list(restore_plan(options_of(**values), task, last)) == expected


def test_the_release_restores_tasks_10_to_19_with_the_prompt_of_task_1_too():
    """Oracle 9 and the sizes of oracle 10: 400 images of each task."""
    loose, exact = options_of(exact_task_match=False), options_of(exact_task_match=True)
    of = lambda options, task, prompt: [s for s, p in restore_plan(options, task, True) if p == prompt]
    assert of(loose, 12, 1) == [1, 10, 11, 12] and of(loose, 12, 2) == [2] and of(loose, 12, 0) == [0]
    assert of(exact, 12, 1) == [1]
    sizes = {t: 400 * len(restore_plan(loose, t, True)) for t in (9, 10, 19)}
    assert sizes == {9: 4000, 10: 4800, 19: 12000}
    assert [-(-size // 128) for size in (400, 4800, 12000)] == [4, 38, 94]
    assert options_of(fidelity="released").exact_task_match is False


# ---- the server: training ----------------------------------------------------------------------------------


@pytest.mark.long
def test_the_server_s_step_is_a_plain_step_of_adam_on_the_restored_images():
    values = VALUES | {"tune_batch": 64, "tune_lr": 0.01}
    method = method_of("pmae", **values)
    server = history()[1][0]
    round_context = round_context_of(TASKS[0], 1, True)
    kept = method.server_replay.buffer(round_context, server)
    rows = pmae.ReplayBatch(
        kept.examples, kept.label, jnp.zeros_like(kept.label), kept.used, TASKS[0].current
    )
    local = method.server_replay.start(round_context, server)
    (part, _), metrics = jax.jit(method.server_replay.step)(round_context, server, local, rows, KEY)
    after = method.server_replay.finish(round_context, server, (part, local[1]))

    decoded = jax.jit(PAIR.decode)(
        FROZEN.decoder, kept.examples.latent, kept.examples.order, server.rules[0].prompt[0]
    )
    image, model = unpatchify(decoded, 1) * 0.25 + 0.5, learner_of(values)

    def loss_of(trained):
        params = server.params._replace(adapter=trained.adapter, classifier=trained.classifier)
        batch = pmae.Batch(image, kept.label, kept.used, kept.label)
        logits = model.predict(FROZEN, params, batch, TASKS[0])
        return cross_entropy(logits, kept.label, TASKS[0].current, kept.used)

    start = Params(server.params.adapter, server.params.classifier)
    loss, gradient = jax.jit(jax.value_and_grad(loss_of))(start)
    adam = optax.adam(0.01)
    update, _ = adam.update(gradient, adam.init(start))
    expected = optax.apply_updates(start, update)
    close(after.params.adapter, expected.adapter, atol=2e-5)
    close(after.params.classifier, expected.classifier, atol=2e-5)
    same(after.params.extra, server.params.extra)  # the reconstructive prompt does not train here
    assert float(metrics["loss"].total / metrics["loss"].weight) == pytest.approx(float(loss), rel=1e-4)


@pytest.mark.long
def test_every_image_is_restored_with_the_prompt_of_its_own_task():
    server, now = history()[3][0], round_context_of(TASKS[1], 1, True)
    pool, kept = server.rules[0], method_of("pmae", **VALUES).server_replay.buffer(now, server)
    task = jnp.arange(len(kept.label)) % 2
    images = pmae.ReplayBatch(kept.examples, kept.label, task, kept.used, TASKS[1].seen)
    found = pmae.restored_batch(options_of(**VALUES), now, learner_of(VALUES), pool, images).input

    def with_prompt(of):
        pixels = PAIR.decode(FROZEN.decoder, kept.examples.latent, kept.examples.order, pool.prompt[of])
        return unpatchify(pixels, 1) * 0.25 + 0.5

    own = kept.used[:, None, None, None] & (task == 0)[:, None, None, None]
    first, second = with_prompt(0), with_prompt(1)
    expected = jnp.where((task == 0)[:, None, None, None], first, second)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert float(jnp.abs(jnp.where(own, first - second, 0)).max()) > 1e-3


def learner_of(values):
    adapter = find_adapter("vpt").build(
        config.part(find_adapter("vpt").options, resolved("pmae", **values)), SIZES, NETWORK
    )
    return learner(NETWORK, adapter, linear(DEPTH, SIZES.classes))


@pytest.mark.long
def test_a_round_reads_every_row_once_an_epoch_in_batches_and_only_these_reach_the_device():
    values = VALUES | {"tune_batch": 8, "tune_epochs": 3}
    method = method_of("pmae", **values)
    replayer = make_replayer(method.server_replay, lambda name, function, **_: jax.jit(function))
    server, batches = history()[3][0], []
    round_context = round_context_of(TASKS[1], 1, True)
    past = (history_kept(0),)
    found = replay_on_server(
        replayer, round_context, server, past, KEY, lambda batch: batches.append(batch) or batch
    )
    mine = int(np.sum(method.server_replay.buffer(round_context, server).used))
    rows = mine + len(past[0].label)
    assert found.examples == 3 * rows and len(batches) == 3 * -(-rows // 8)
    assert all(len(batch.label) == 8 for batch in batches)
    for epoch in range(3):
        some = batches[epoch * len(batches) // 3 : (epoch + 1) * len(batches) // 3]
        latent = np.concatenate([np.asarray(b.examples.latent)[np.asarray(b.mask)] for b in some])
        assert len(np.unique(latent.reshape(len(latent), -1), axis=0)) == rows
        task = np.concatenate([np.asarray(b.task)[np.asarray(b.mask)] for b in some])
        assert np.bincount(task).tolist() == [len(past[0].label), mine]
    first, second = (
        np.concatenate([b.examples.latent for b in batches[i : i + 2]]) for i in (0, len(batches) // 3)
    )
    assert np.abs(first - second).max() > 0  # another order in every epoch
    present = np.unique(np.concatenate([past[0].label, batches[0].label]))
    assert set(np.flatnonzero(batches[0].classes)) >= set(present)


@functools.cache
def history_kept(task):
    """What the server keeps of a task that is over."""
    from fcljax.federated.engine import keep_task

    method = method_of("pmae", **VALUES)
    return keep_task(engine_of(method), FROZEN, history()[2 * task + 1][0], TASKS[task], 1)


@pytest.mark.long
def test_the_pool_of_earlier_tasks_changes_the_last_round_of_a_task_and_no_other():
    whole, alone = history(), history(wo_restore_pool=True)
    same(whole[2][0].params, alone[2][0].params)
    with pytest.raises(AssertionError):
        close(whole[3][0].params.classifier, alone[3][0].params.classifier, atol=1e-5)
    rows = [[round_[2].metrics["replay_examples"] for round_ in each] for each in (whole, alone)]
    assert rows[0][3] == rows[1][3] + rows[0][1] and rows[0][:3] == rows[1][:3]


@pytest.mark.long
def test_a_result_that_is_not_finite_is_not_kept():
    method = method_of("pmae", **VALUES | {"tune_lr": 1e38})
    server, states = begin(method)
    after = play(engine_of(method), server, states, rounds=1)
    assert [report.refused for _, _, report in after] == [1, 1]
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(after[-1][0].params))


def test_without_any_row_nothing_is_trained():
    method = method_of("pmae", **VALUES)
    replayer = make_replayer(method.server_replay, lambda name, function, **_: jax.jit(function))
    server, _ = begin(method)
    found = replay_on_server(replayer, round_context_of(TASKS[0]), server, (), KEY, lambda tree: tree)
    assert found.examples == 0 and not found.metrics
    same(found.server, server)


def test_noise_on_the_mean_would_not_protect_what_is_uploaded_and_is_refused():
    with pytest.raises(InputError, match="aggregator"):
        method_of("pmae", clip_norm=1.0, noise_multiplier=1.0, **VALUES)
    method_of("pmae", aggregator="median", **VALUES)


# ---- the archive -------------------------------------------------------------------------------------------


def test_what_is_kept_comes_back_from_disk_as_it_was_and_damage_is_named(tmp_path):
    kept = history_kept(0)
    noted = [checkpoint.save_task(tmp_path, task, kept) for task in range(2)]
    for found in checkpoint.load_tasks(tmp_path, noted, kept):
        same(found, kept)
    with pytest.raises(InputError, match="task-002.npz"):
        checkpoint.load_tasks(tmp_path, [*noted, noted[0]], kept)
    other = ReplayBuffer(kept.examples._replace(order=kept.examples.order[:, :1]), kept.label, kept.used)
    with pytest.raises(InputError, match="order"):
        checkpoint.load_tasks(tmp_path, noted[:1], other)
    (tmp_path / "task-001.npz").write_bytes(b"no archive")
    with pytest.raises(InputError, match="cannot be read"):
        checkpoint.load_tasks(tmp_path, noted, kept)


# ---- what is given away ------------------------------------------------------------------------------------


def test_how_close_rebuilt_images_come_is_measured_as_it_says():
    original = np.zeros((4, 2, 2, 3))
    original[1:] = np.array([0.2, 0.5, 0.9])[:, None, None, None]
    label = np.array([0, 0, 0, 1])
    assert restored.psnr(original + 0.1 * (original < 0.5), original + 0.0) > 20
    assert restored.psnr(np.full((1, 1), 0.6), np.full((1, 1), 0.5)) == pytest.approx(20.0)
    # the second looks like the third; the last is alone in its class
    pixels = original.copy()
    pixels[1] = 0.45
    assert restored.identification(pixels, original, label) == (0.75, pytest.approx(2 / 4))
    hidden = np.zeros_like(original, bool)
    hidden[:, 0] = True
    worse = original + np.where(hidden, 0.3, 0.05)
    found = restored.closeness(Reconstruction(original, original, worse, pixels, hidden), label)
    assert found["mse_unprompted"] == pytest.approx(np.mean((np.clip(worse, 0, 1) - original)[hidden] ** 2))
    assert found["mse_restored"] == pytest.approx(0.25**2 / 4) and found["images"] == 4


@pytest.mark.long
def test_what_a_run_shows_is_what_the_server_would_rebuild():
    server, image = history()[-1][0], DATA.input[:3]
    method = method_of("pmae", **VALUES)
    found = method.server_replay.reconstruct(round_context_of(TASKS[1]), server, image, KEY)
    close(found.original, image, atol=1e-5)
    assert float(found.hidden.mean()) == 0.5
    np.testing.assert_allclose(found.masked[found.hidden], 0.5)
    close(found.masked[~found.hidden], found.original[~found.hidden], atol=1e-6)
    masking = random_mask(KEY, 3, 4, 0.5)
    latent = PAIR.encode(FROZEN.network, between(NETWORK, PAIR, image), masking.keep)
    pixels = unpatchify(PAIR.decode(FROZEN.decoder, latent, masking.restore, prompt_of(server)), 1)
    close(found.restored, pixels * 0.25 + 0.5, atol=1e-5)
    assert np.abs(np.asarray(found.restored - found.unprompted)).max() > 0
