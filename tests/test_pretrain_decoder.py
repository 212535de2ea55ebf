"""A decoder for a frozen encoder: it learns, from training images alone, the same bytes again, also after a
kill; its file joins the encoder that it fits; the packaged one knows how hidden patches look."""

import dataclasses
import functools
from importlib import resources

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import vit_files as files
from flax.traverse_util import flatten_dict
from PIL import Image
from vit_files import TINY, same

from fcljax import cli
from fcljax.config import preset
from fcljax.data.augment import Preprocess, clean_view, sample_crops
from fcljax.data.glyphs import GLYPHS, PRETRAIN, glyph_fields, glyphs
from fcljax.errors import InputError
from fcljax.models.mae import decode, patchify, random_mask, reconstruction_loss, sincos_positions
from fcljax.models.vit import Injection, apply_vit
from fcljax.models.weights.pretrained import PretrainedDecoder, WeightOptions, load_backbone, save_native
from fcljax.options import replaced
from fcljax.pretraining import decoder as module
from fcljax.pretraining.decoder import PretrainDecoderConfig, pretrain_decoder, random_crops
from fcljax.runs.inputs import load_inputs

pytestmark = pytest.mark.long  # it trains a decoder; the packaged one is checked elsewhere

ASSET = resources.files("fcljax") / "assets" / "vit_micro_decoder.safetensors"
SMALL = dict(
    heads=2,
    decoder_width=16,
    decoder_depth=1,
    decoder_heads=2,
    decoder_mlp=16,
    batch_size=8,
    steps=6,
    checkpoint_every=2,
    validate=4,
    holdout=0.2,
    normalise="half",
)
MARK = 255  # of test images, which nobody may look at


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with an encoder and a data set of plain grey images, so that what is hidden can be told."""
    folder = tmp_path_factory.mktemp("decoder")
    save_native(folder / "encoder.safetensors", files.encoder(), {})
    level = np.random.default_rng(0).permutation(MARK)[:40].astype(np.uint8)
    plain, test = np.tile(level[:, None, None, None], (1, 8, 8, 3)), np.full((2, 8, 8, 3), MARK, np.uint8)
    label = np.arange(40) % 2
    np.savez(folder / "plain.npz", x_train=plain, y_train=label, x_test=test, y_test=label[:2])
    return folder


def config(here, out="a", **options):
    places = dict(dataset=f"npz:{here / 'plain.npz'}", checkpoint=str(here / "encoder.safetensors"))
    return PretrainDecoderConfig(**places | SMALL | options, out=here / f"{out}.safetensors")


@pytest.fixture(scope="module")
def first(here):
    return pretrain_decoder(config(here, "first"))


def load(here, decoder="first", **options):
    where = dict(name=None, checkpoint=str(here / "encoder.safetensors"), image_size=None)
    where |= {key: options.pop(key) for key in tuple(options) if key in (*where, "dtype")}
    how = dict(heads=2, decoder=decoder and str(here / f"{decoder}.safetensors")) | options
    return load_backbone(**where, options=WeightOptions(**how))


def prepared(cfg):
    """(plan, encoder, images) of a training before its first step."""
    backbone = module.load_network(cfg, cfg.image_size)
    images = module._from_dataset(cfg, backbone.config.image_size)
    return module._plan(cfg, backbone, images), backbone.params, images


# ---- training ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_it_learns_what_hidden_patches_look_like_and_leaves_the_encoder_as_it_is(here):
    found = pretrain_decoder(config(here, "long", steps=100, lr=1.0, checkpoint_every=100, validate=8))
    assert found["validation loss"] < 0.6 * found["validation loss of the mean patch"]
    assert found["steps"] == 100 and found["training loss"] < found["validation loss of the mean patch"]
    same(load(here, "long").params, jax.tree.map(jnp.asarray, files.encoder()))
    tensors = safetensors.numpy.load_file(here / "long.safetensors")
    assert all(name.startswith("decoder.") and x.dtype == np.float16 for name, x in tensors.items())


@pytest.mark.long
def test_visible_patches_are_painted_where_they_count(here):
    """Half as far off as without, under masks that neither has trained on."""
    errors = {}
    for weight in (0.0, 1.0):
        cfg = config(here, f"visible{weight}", steps=100, lr=1.0, visible_weight=weight)
        pretrain_decoder(cfg)
        plan, encoder, images = prepared(cfg)
        seen, masking = module._held_out_views(plan, jax.tree.map(jnp.asarray, images.held_out), jnp.int32(0))
        decoder = load(here, f"visible{weight}").decoder.params
        patches = module._reconstruct(plan, encoder, decoder, seen, masking)
        errors[weight] = float(reconstruction_loss(patches, seen, ~masking.masked))
    assert errors[1.0] < 0.5 * errors[0.0]


def test_every_parameter_but_the_fixed_positions_is_trained(here, first):
    plan = prepared(config(here))[0]
    trained = safetensors.numpy.load_file(here / "first.safetensors")
    initial = flatten_dict({"decoder": module._initial_state(plan).params}, sep=".")
    still = [name for name, x in initial.items() if np.array_equal(trained[name], np.asarray(x, np.float16))]
    assert still == ["decoder.pos"]


def test_it_leaves_the_file_and_a_figure_and_no_checkpoints(here, first):
    assert {path.name for path in here.glob("first*")} == {"first.safetensors", "first.png"}
    assert first["bytes"] == (here / "first.safetensors").stat().st_size
    with Image.open(first["figure"]) as figure:
        assert figure.size[0] > 1000
    assert np.isfinite([first["training loss"], first["validation loss"]]).all()


@pytest.mark.long
def test_the_same_settings_give_the_same_bytes_and_another_seed_others(here, first):
    written = (here / "first.safetensors").read_bytes()
    pretrain_decoder(config(here, "again"))
    assert (here / "again.safetensors").read_bytes() == written
    pretrain_decoder(config(here, "other", seed=1))
    assert (here / "other.safetensors").read_bytes() != written


def test_killed_and_resumed_equals_uninterrupted(here, first, monkeypatch):
    steps, save, step = [], module.checkpoint.save, module._step

    def dies(manager, snapshot):
        save(manager, snapshot)
        if snapshot.step == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.checkpoint, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        pretrain_decoder(config(here, "killed"))
    monkeypatch.setattr(module.checkpoint, "save", save)
    assert not (here / "killed.safetensors").exists()
    with pytest.raises(
        InputError, match="^out: .*killed.checkpoints' holds an unfinished training; continue"
    ):
        pretrain_decoder(config(here, "killed"))
    with pytest.raises(InputError, match=r"^resume: .* other settings: lr \(0.1, not [\d.]+\)$"):
        pretrain_decoder(config(here, "killed", lr=0.1, resume=True))
    monkeypatch.setattr(
        module, "_step", lambda *arguments: steps.append(arguments[-1].step) or step(*arguments)
    )
    pretrain_decoder(config(here, "killed", resume=True))
    assert steps == [4, 5]
    for kind in ("safetensors", "png"):
        assert (here / f"killed.{kind}").read_bytes() == (here / f"first.{kind}").read_bytes()
    assert not (here / "killed.checkpoints").exists()


@pytest.mark.long
def test_a_training_that_diverges_ends_at_once_says_so_and_leaves_nothing(here, monkeypatch):
    before, steps, step = set(here.iterdir()), [], module._step
    monkeypatch.setattr(
        module, "_step", lambda *arguments: steps.append(arguments[-1].step) or step(*arguments)
    )
    with pytest.raises(InputError, match="^lr: 1.0 made the training diverge; nearest to try: 0.1$"):
        pretrain_decoder(config(here, "b", lr=1.0, weight_decay=1e30))
    assert set(here.iterdir()) == before and len(steps) < 6


@pytest.mark.long
def test_mixed_precision_keeps_parameters_and_loss_in_float32(here):
    plan, encoder, images = prepared(config(here, dtype="bfloat16"))
    assert plan.decoder.dtype == plan.encoder.dtype == "bfloat16"
    state, loss = module._step(
        plan, encoder, module._initial_state(plan), images.batch(0), module.StepPosition(0, 0, np.float32(1))
    )
    kinds = {x.dtype.name for x in jax.tree.leaves((state.params, state.curve, loss))}
    assert kinds == {"float32"} and np.isfinite(loss)
    assert encoder["block_00"]["attn"]["qkv"]["kernel"].dtype == jnp.bfloat16


@pytest.mark.long
def test_masks_and_crops_are_new_in_every_step(here):
    plan, encoder, images = prepared(config(here))
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)

    def losses(plan):
        step = functools.partial(module._step, plan, encoder)
        return [
            float(
                step(
                    module._initial_state(plan),
                    module.StoredImages(image),
                    module.StepPosition(i, 0, np.float32(1)),
                )[1]
            )
            for i in (0, 1, 0)
        ]

    masked, cropped = losses(plan._replace(crops=False)), losses(plan)
    assert masked[0] == masked[2] != masked[1] and cropped[0] == cropped[2] != masked[0]


# ---- images ------------------------------------------------------------------------------------------------


def test_an_epoch_sees_every_training_image_once_and_none_that_is_held_out(here):
    plan, _, images = prepared(config(here, epochs=3, holdout=0.2))
    level = lambda rows: sorted(map(tuple, rows[:, 0, 0].tolist()))
    epochs = [np.concatenate([images.batch(4 * epoch + i)[0] for i in range(4)]) for epoch in range(2)]
    assert images.steps_per_epoch == 4 and plan.steps == 12 and len(images.held_out[0]) == 4
    assert level(epochs[0]) == level(epochs[1]) and len(set(level(epochs[0]))) == 32
    assert not np.array_equal(*epochs)  # in another order
    assert not set(level(epochs[0])) & set(level(images.held_out[0]))
    assert MARK not in epochs[0] and MARK not in images.held_out[0]


def test_letters_are_those_for_pretraining_and_new_in_every_step(here, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "glyph_fields", lambda chars: asked.append(chars) or glyph_fields("AB"))
    cfg = config(here, dataset="letters", validate=8)
    images = module._letters(cfg, 8)
    assert asked == [PRETRAIN] and not set(PRETRAIN) & set(GLYPHS)
    one, two, again = (images.batch(step)[0] for step in (0, 1, 0))
    assert one.shape == (8, 8, 8, 3) and images.held_out[0].shape == (8, 8, 8, 3) and not images.crops
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, two) and not np.array_equal(one, images.held_out[0])


def test_crops_are_pillow_s_bicubic_ones():
    image = np.random.default_rng(0).integers(0, 256, (1, 40, 40, 3), dtype=np.uint8)
    whole = Preprocess(16, crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0)
    crops = jax.jit(random_crops, static_argnums=0)
    keys = jax.random.split(jax.random.key(0), 1)
    pillow = np.asarray(Image.fromarray(image[0]).resize((16, 16), Image.Resampling.BICUBIC))
    assert np.abs(np.asarray(crops(whole, image, keys))[0] * 255 - pillow).max() <= 1.01
    flipped = dataclasses.replace(whole, flip=1.0, mean=(0.5,) * 3, std=(0.5,) * 3)
    assert np.abs((np.asarray(crops(flipped, image, keys))[0] + 1) * 127.5 - pillow[:, ::-1]).max() <= 1.01


def test_a_crop_is_the_box_that_was_drawn_in_the_original_s_pixels():
    ramp = np.tile(np.arange(0, 200, 5, dtype=np.uint8)[None, None, :, None], (1, 40, 1, 3))
    part = Preprocess(8, crop_scale=(0.2, 0.2), crop_ratio=(1.0, 1.0), flip=0.0)
    keys, sizes = jax.random.split(jax.random.key(1), 1), jnp.array([[80, 80]])
    left, cols = sample_crops(part, sizes, keys)[0][0, jnp.array([1, 3])]
    place = (left + (np.arange(8) + 0.5) * cols / 8) / 2 - 0.5  # of the stored 40 pixels
    crops = jax.jit(random_crops, static_argnums=0)
    found = np.asarray(crops(part, ramp, keys, sizes))[0, 4, :, 0] * 255
    np.testing.assert_allclose(found[1:-1], 5 * place[1:-1], atol=1.0)


def test_photographs_are_cropped_and_digits_are_not(here):
    plan, encoder, images = prepared(config(here))
    assert plan.crops and plan.preprocess.crop_scale == (0.2, 1.0) and plan.preprocess.flip == 0.5
    digits = prepared(config(here, dataset="digits"))
    assert not digits[0].crops


# ---- validation --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_validation_loss_does_not_depend_on_batches(here):
    losses = []
    for batch in (8, 3):
        plan, encoder, images = prepared(config(here, batch_size=batch, validate=8))
        losses.append(
            module.validation_loss(plan, encoder, module._initial_state(plan).params, images.held_out)
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_mean_patch_by_hand(here):
    plan = prepared(config(here))[0]
    plan = plan._replace(preprocess=dataclasses.replace(plan.preprocess, margin=1.0))
    image = np.zeros((2, 8, 8, 3), np.uint8)
    image[1] = 255  # -1 and 1 around a mean of 0
    assert module.baseline_loss(plan, module.StoredImages(image)) == pytest.approx(1.0)
    image[:, :4] = 100  # places that are alike in all images can be guessed
    expected = hidden(plan)[:, 2:].sum() / 6  # three of each image's four patches are hidden
    assert module.baseline_loss(plan, module.StoredImages(image)) == pytest.approx(expected)


def hidden(plan):
    """Which of the four patches are hidden, of two images."""
    return np.asarray(
        module._held_out_views(plan, module.StoredImages(jnp.zeros((2, 8, 8, 3), jnp.uint8)), jnp.int32(0))[
            1
        ].masked
    )


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(steps=0), "^steps: 0 is too small; nearest valid value: 1"),
        (dict(lr=0.0), "^lr: 0.0 must be finite and positive"),
        (dict(mask_ratio=1.0), "^mask_ratio: 1.0 is too large; it must be below 1.0"),
        (
            dict(mask_ratio=0.8),
            "^mask_ratio: 0.8 of 4 patches leaves none hidden or none vis.*; nearest: 0.75",
        ),
        (dict(holdout=0.0), "^holdout: 0.0 must be finite and positive"),
        (dict(decoder_width=18), "^decoder_width: 18 is not a multiple of 4; nearest: 16|20"),
        (dict(decoder_heads=7), "^decoder_heads: 7 does not divide --decoder-width 16; nearest: 8"),
        (dict(batch_size=64), "^batch_size: 64 of 32 training images; nearest: 32"),
        (
            dict(dataset="letters", epochs=3),
            "^epochs: 3 of letters, but letters are drawn new .*; give --steps",
        ),
        (dict(dataset="lettres"), "^dataset: .*lettres"),
        (dict(resume=True), "^resume: there is no unfinished training in "),
        (dict(checkpoint=None, backbone="vit_b16"), "^checkpoint: vit_b16 needs a file of weights"),
        (dict(image_size=9), "^image_size: 9 is not a multiple of the patch size 4"),
    ],
)
def test_bad_options_are_one_line_that_names_the_field_and_leave_nothing(here, options, message):
    before = set(here.iterdir())
    with pytest.raises(InputError, match=message) as error:
        pretrain_decoder(config(here, "bad", **options))
    assert "\n" not in str(error.value) and set(here.iterdir()) == before


def test_another_suffix_is_refused(here):
    with pytest.raises(InputError, match=r"^out: .*must end in \.safetensors; nearest: "):
        pretrain_decoder(dataclasses.replace(config(here), out=here / "a.npz"))


def test_the_command_line_says_what_was_made(here, first, capsys, monkeypatch):
    monkeypatch.chdir(here)
    cfg = config(here)
    flags = {**SMALL, "dataset": cfg.dataset, "checkpoint": cfg.checkpoint, "out": "cli.safetensors"}
    given = [word for name, value in flags.items() for word in ("--" + name.replace("_", "-"), str(value))]
    assert cli.main(["pretrain-decoder", *given]) == 0
    assert "validation loss of the mean patch" in capsys.readouterr().out
    assert (here / "cli.safetensors").read_bytes() == (here / "first.safetensors").read_bytes()


# ---- the file and its encoder ------------------------------------------------------------------------------


def told(path):
    with safetensors.safe_open(path, "numpy") as file:
        return file.metadata()


def test_the_file_tells_what_is_needed_to_use_it(here, first):
    loaded, plan = load(here), prepared(config(here))[0]
    assert isinstance(loaded.decoder, PretrainedDecoder)
    assert loaded.decoder.config == plan.decoder
    assert (loaded.decoder.mean, loaded.decoder.std) == ((0.5,) * 3, (0.5,) * 3)
    metadata = told(here / "first.safetensors")
    assert metadata["encoder_sha256"] == loaded.digest and metadata["mask_ratio"] == "0.75"
    assert metadata["command"].startswith("fcljax pretrain-decoder --dataset npz:")
    assert not any("another encoder" in note for note in loaded.notes)
    assert load(here, None).decoder is None


def test_a_run_takes_the_file_as_an_option(here, first):
    given = preset("pmae")
    given = dataclasses.replace(given, checkpoint=str(here / "encoder.safetensors"), heads=2)
    named = replaced(given, decoder=str(here / "first.safetensors"))
    assert load_inputs(given).backbone.decoder is None
    same(load_inputs(named).backbone.decoder.params, load(here).decoder.params)
    with pytest.raises(InputError, match="^decoder: 'encoder.safetensors' has no decoder$"):
        load_inputs(replaced(given, decoder=given.checkpoint))


@pytest.mark.long
def test_its_own_pixel_constants_are_kept_apart_from_the_encoder_s(here):
    pretrain_decoder(config(here, "unit", steps=1, normalise="unit"))
    loaded = load(here, "unit")
    assert (loaded.decoder.mean, loaded.decoder.std) == ((0.0,) * 3, (1.0,) * 3)
    assert (loaded.mean, loaded.std) == ((0.5,) * 3, (0.5,) * 3)


def test_at_another_image_size_the_positions_are_made_anew(here, first):
    loaded = load(here, image_size=16)
    assert loaded.decoder.config.image_size == loaded.config.image_size == 16
    np.testing.assert_array_equal(loaded.decoder.params["pos"], sincos_positions(4, 16))


def test_a_decoder_of_another_encoder_of_the_same_shape_is_told(here, first):
    save_native(here / "twin.safetensors", files.encoder(seed=5), {})
    loaded = load(here, checkpoint=str(here / "twin.safetensors"))
    assert any(note.startswith("the decoder was trained on another encoder") for note in loaded.notes)


def test_the_decoder_of_a_whole_autoencoder_can_be_taken(here):
    tensors = files.timm(files.encoder(seed=5)) | files.mae_decoder(files.decoder())
    files.save(here / "mae.safetensors", tensors, {"mean": "[0.1, 0.2, 0.3]", "std": "0.5"})
    loaded = load(here, "mae")
    same(loaded.params, jax.tree.map(jnp.asarray, files.encoder()))
    same(loaded.decoder.params, jax.tree.map(jnp.asarray, files.decoder()))
    assert loaded.decoder.mean == (0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (dict(width=16, heads=2), "goes with tokens of width 12, and the encoder has 16; train one for it"),
        (dict(patch=2), "goes with patches of side 4, and the encoder has 2; train one for it"),
    ],
)
def test_a_decoder_that_does_not_fit_is_refused_by_name(here, first, encoder, message):
    save_native(here / "wide.safetensors", files.encoder(dataclasses.replace(TINY, **encoder)), {})
    with pytest.raises(InputError, match=f"^decoder: 'first.safetensors' {message}"):
        load(here, checkpoint=str(here / "wide.safetensors"))


def test_a_file_without_a_decoder_or_with_half_of_one_is_refused_by_name(here, first):
    with pytest.raises(InputError, match="^decoder: 'encoder.safetensors' has no decoder$"):
        load(here, "encoder")
    with pytest.raises(InputError, match="^decoder: no file "):
        load(here, "nothing")
    tensors = safetensors.numpy.load_file(here / "first.safetensors")
    tensors.pop("decoder.norm.bias")
    files.save(here / "half.safetensors", tensors, told(here / "first.safetensors"))
    with pytest.raises(InputError, match="^decoder: does not fit a decoder: missing: decoder.norm.bias$"):
        load(here, "half")


# ---- the packaged decoder ----------------------------------------------------------------------------------


def test_the_packaged_decoder_was_made_by_the_command_of_the_readme_for_the_packaged_encoder():
    metadata, loaded = told(str(ASSET)), load_backbone("vit_micro", None, None)
    assert metadata["command"] == "fcljax pretrain-decoder --visible-weight 1.0"
    assert len(ASSET.read_bytes()) <= 1_000_000
    assert metadata["encoder_sha256"] == loaded.digest and loaded.notes == ()
    assert metadata["steps"] == str(PretrainDecoderConfig().steps)


def test_the_packaged_decoder_comes_with_vit_micro_at_its_own_size():
    loaded = load_backbone(None, None, None, "bfloat16")
    assert loaded.decoder.config.dtype == "bfloat16"
    assert (loaded.decoder.mean, loaded.decoder.std) == (loaded.mean, loaded.std)
    assert load_backbone("vit_micro", None, 64).decoder is None
    assert (
        load_backbone("vit_micro", None, 64, options=WeightOptions(decoder=str(ASSET))).decoder.config.grid
        == 8
    )


def test_the_packaged_decoder_reconstructs_letters_that_nobody_trained_on():
    x = glyphs(4, 0, seed=12, chars=GLYPHS[::4])[0]
    loaded = load_backbone("vit_micro", None, None)
    views = Preprocess(32, loaded.mean, loaded.std, margin=1.0)

    @functools.partial(jax.jit, static_argnums=0)
    def losses(config, encoder, params, x):
        seen = clean_view(views, x)
        masking = random_mask(jax.random.key(0), len(x), 16, 0.75)
        latent = apply_vit(loaded.config, encoder, seen, Injection(keep=masking.keep), True).tokens
        predicted = decode(config, params, latent, masking.restore)
        mean = jnp.broadcast_to(patchify(seen, 8).mean(0), predicted.shape)
        return [reconstruction_loss(some, seen, masking.masked) for some in (predicted, mean)]

    ours, mean = losses(loaded.decoder.config, loaded.params, loaded.decoder.params, x)
    assert ours < 0.8 * mean
