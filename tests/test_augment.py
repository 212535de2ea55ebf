"""Crops and resizes inside jit are those of Pillow, and depend on nothing but the image and its key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from fcljax.data.augment import NORMALISE, Preprocess, clean_view, crop_resize, sample_crops, short_side, train_view
from fcljax.errors import InputError

PHOTOS = np.stack(load_sample_images().images)  # two photographs, 427 x 640

train = jax.jit(train_view, static_argnums=0)
clean = jax.jit(clean_view, static_argnums=0)
crop = jax.jit(crop_resize, static_argnums=3)
crops = jax.jit(sample_crops, static_argnums=(0, 1, 2))


def patches(side, count=4):
    """Parts of a photograph."""
    corners = np.random.RandomState(side).randint(0, 427 - side, (count, 2))
    return np.stack([PHOTOS[i % 2, top : top + side, left : left + side] for i, (top, left) in enumerate(corners)])


def keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def pillow_clean(image, size):
    """torchvision's Resize (bicubic) and CenterCrop on a PIL image."""
    image = Image.fromarray(image)
    short = int(256 / 224 * size)
    if image.width <= image.height:
        resized = image.resize((short, int(short * image.height / image.width)), Image.Resampling.BICUBIC)
    else:
        resized = image.resize((int(short * image.width / image.height), short), Image.Resampling.BICUBIC)
    left, top = round((resized.width - size) / 2), round((resized.height - size) / 2)
    return np.asarray(resized.crop((left, top, left + size, top + size)), np.float32)


def pillow_crop(image, box, flip, size):
    """torchvision's resized_crop (bilinear) and hflip on a PIL image."""
    top, left, rows, cols = (int(side) for side in box)
    cut = Image.fromarray(image).crop((left, top, left + cols, top + rows)).resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else cut, np.float32)


def assert_grey_levels_match(ours, theirs, share=0.1):
    """No value is more than a level off, and few are: where exact values are halves, Pillow's 22-bit weights round either way."""
    difference = np.abs(np.asarray(ours) - theirs)
    assert difference.max() <= 1.001
    assert (difference > 0.5).mean() < share


def test_the_short_side_is_256_for_224():
    assert short_side(224) == 256
    assert short_side(64) == 73


@pytest.mark.parametrize(
    "images, size",
    [
        (patches(32), 64),
        (patches(32), 32),
        (PHOTOS, 224),
        (PHOTOS.transpose(0, 2, 1, 3), 224),
        (patches(90), 33),
        (np.random.RandomState(0).choice(np.uint8([0, 255]), (3, 40, 40, 3)), 64),
    ],
)
def test_the_clean_view_is_pillows(images, size):
    ours = np.asarray(clean(Preprocess(size), images)) * 255
    assert_grey_levels_match(ours, np.stack([pillow_clean(image, size) for image in images]), share=0.002)


@pytest.mark.parametrize("side, size", [(32, 16), (256, 224), (200, 48)])
def test_crops_are_pillows(side, size):
    images, rng = patches(side, 6), np.random.RandomState(size)
    sides = rng.randint(1, side + 1, (6, 2))
    boxes, flips = np.concatenate([rng.randint(0, side - sides + 1), sides], 1), rng.rand(6) < 0.5
    theirs = np.stack([pillow_crop(*row, size) for row in zip(images, boxes, flips, strict=True)])
    assert_grey_levels_match(crop(images, boxes, flips, size), theirs)


def test_the_training_view_is_pillows_crop_of_the_sampled_box():
    images = patches(32)
    boxes, flips = crops(Preprocess(64), 32, 32, keys(4))
    theirs = np.stack([pillow_crop(*row, 64) for row in zip(images, np.asarray(boxes), np.asarray(flips), strict=True)])
    assert_grey_levels_match(train(Preprocess(64), images, keys(4)) * 255, theirs)


@pytest.mark.parametrize("box", [(0, 0, 32, 32), (0, 0, 1, 1), (31, 31, 1, 1), (0, 5, 32, 1), (3, 0, 2, 32), (7, 9, 11, 13)])
def test_the_smallest_and_the_largest_boxes_are_pillows_too(box):
    images = patches(32, 1)
    for flip in (False, True):
        assert_grey_levels_match(crop(images, jnp.array([box]), jnp.array([flip]), 24)[0], pillow_crop(images[0], box, flip, 24))


def test_the_whole_box_at_the_same_size_is_the_image():
    images = patches(48)
    whole = jnp.tile(jnp.array([0, 0, 48, 48]), (4, 1))
    np.testing.assert_array_equal(crop(images, whole, jnp.zeros(4, bool), 48), images)
    np.testing.assert_array_equal(crop(images, whole, jnp.ones(4, bool), 48), images[:, :, ::-1])


@pytest.mark.parametrize("box", [(0, 0, 32, 32), (3, 5, 9, 17)])
def test_a_flip_is_exactly_the_mirror_image(box):
    images, boxes = patches(32), jnp.tile(jnp.array(box), (4, 1))
    plain, mirrored = (crop(images, boxes, jnp.full(4, flip), 64) for flip in (False, True))
    np.testing.assert_array_equal(mirrored, plain[:, :, ::-1])


def test_an_image_that_has_the_size_is_not_resampled():
    images = np.random.RandomState(0).randint(0, 256, (3, 32, 32, 3), np.uint8)
    np.testing.assert_allclose(clean(Preprocess(32, resize=32), images) * 255, images, rtol=1e-6)
    np.testing.assert_allclose(clean(Preprocess(28, resize=32), images) * 255, images[:, 2:30, 2:30], rtol=1e-6)


def test_a_training_image_does_not_depend_on_its_batch():
    images, key = patches(32), keys(4)
    together = train(Preprocess(64), images, key)
    np.testing.assert_array_equal(together, train(Preprocess(64), images[::-1], key[::-1])[::-1])
    others = np.full_like(images, 255)
    others[2] = images[2]
    np.testing.assert_array_equal(train(Preprocess(64), others, key)[2], together[2])
    alone = train(Preprocess(64), images[2:3], key[2:3])
    np.testing.assert_allclose(together[2:3], alone, atol=1e-6)


def test_different_keys_give_different_views_and_equal_keys_equal_ones():
    images = np.repeat(patches(32, 1), 4, axis=0)
    views = np.concatenate([train(Preprocess(64), images, keys(4, seed)) for seed in range(5)]).reshape(20, -1)
    assert len(np.unique(views, axis=0)) == 20
    same = np.asarray(train(Preprocess(64), images, jnp.repeat(keys(1), 4))).reshape(4, -1)
    assert len(np.unique(same, axis=0)) == 1


@pytest.mark.parametrize("shape, scale", [((20, 60), (0.5, 1.0)), ((7, 100), (1e-4, 1e-3))])
def test_boxes_lie_within_the_image(shape, scale):
    boxes, _ = crops(Preprocess(32, crop_scale=scale), *shape, keys(5000))
    top, left, rows, cols = np.asarray(boxes).T
    assert (top >= 0).all() and (left >= 0).all() and (rows >= 1).all() and (cols >= 1).all()
    assert (top + rows <= shape[0]).all() and (left + cols <= shape[1]).all()


def test_crops_have_the_areas_and_ratios_of_the_reference():
    boxes, flips = crops(Preprocess(224), 256, 256, keys(5000))
    top, left, rows, cols = np.asarray(boxes, np.float64).T
    area, ratio = rows * cols / 256**2, cols / rows
    assert 0.049 < area.min() < 0.06 and area.max() <= 1
    assert 0.74 < ratio.min() < 0.76 and 1.32 < ratio.max() < 1.35
    reference = reference_crops(5000, 256, 256)
    np.testing.assert_allclose(np.quantile(area, [0.1, 0.5, 0.9]), np.quantile(reference[:, 0], [0.1, 0.5, 0.9]), atol=0.02)
    np.testing.assert_allclose(np.quantile(ratio, [0.1, 0.5, 0.9]), np.quantile(reference[:, 1], [0.1, 0.5, 0.9]), atol=0.02)
    assert abs((top / np.maximum(256 - rows, 1))[rows < 200].mean() - 0.5) < 0.02
    assert abs((left / np.maximum(256 - cols, 1))[cols < 200].mean() - 0.5) < 0.02
    assert abs(np.mean(flips) - 0.5) < 0.02


def reference_crops(count, height, width):
    """The rule in plain Python: area share and ratio of the first fitting draw out of ten."""
    rng, found = np.random.RandomState(0), []
    for _ in range(count):
        for _ in range(10):
            area, ratio = height * width * rng.uniform(0.05, 1), np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
            rows, cols = round(np.sqrt(area / ratio)), round(np.sqrt(area * ratio))
            if 0 < cols <= width and 0 < rows <= height:
                found.append((rows * cols / (height * width), cols / rows))
                break
    return np.array(found)


@pytest.mark.parametrize(
    "height, width, ratio, box",
    [
        (100, 20, (3 / 4, 4 / 3), (36, 0, 27, 20)),  # too tall: the ratio nearest to the image's, 20 / 27 ~ 3 / 4
        (20, 100, (3 / 4, 4 / 3), (0, 36, 20, 27)),  # too wide
        (40, 40, (0.5, 0.8), (0, 4, 40, 32)),
    ],
)
def test_when_no_draw_fits_the_crop_is_central(height, width, ratio, box):
    # A crop as large as the image fits only at the image's own ratio, which is outside the range.
    boxes, _ = crops(Preprocess(32, crop_scale=(1.0, 1.0), crop_ratio=ratio), height, width, keys(100))
    np.testing.assert_array_equal(boxes, np.tile(box, (100, 1)))


def test_without_random_crops_only_the_flip_is_random():
    preprocess = Preprocess(32, crop_scale=None)
    images = patches(40, 32)
    views, plain = np.asarray(train(preprocess, images, keys(32))), np.asarray(clean(preprocess, images))
    _, flips = crops(preprocess, 40, 40, keys(32))
    flips = np.asarray(flips)
    assert 0 < flips.sum() < 32
    np.testing.assert_array_equal(views[~flips], plain[~flips])
    np.testing.assert_array_equal(views[flips], plain[flips][:, :, ::-1])


@pytest.mark.parametrize("name", NORMALISE)
def test_normalising_subtracts_the_mean_and_divides_by_the_deviation(name):
    mean, std = NORMALISE[name]
    images = patches(32)
    ours = clean(Preprocess(32, mean=mean, std=std, resize=32), images)
    np.testing.assert_allclose(ours, (images / 255 - np.array(mean)) / np.array(std), atol=1e-6)


def test_one_trace_serves_all_batches():
    traces = []

    @jax.jit
    def view(images, key):
        traces.append(1)
        return train_view(Preprocess(48), images, key)

    for seed in range(3):
        assert view(patches(32), keys(4, seed)).shape == (4, 48, 48, 3)
    assert len(traces) == 1


def test_equal_preprocessing_is_one_static_argument():
    assert hash(Preprocess(64)) == hash(Preprocess(64))
    assert Preprocess(64) != Preprocess(64, flip=0.0)


@pytest.mark.parametrize(
    "field, value",
    [
        ("image_size", 0),
        ("resize", 31),
        ("crop_scale", (0.0, 1.0)),
        ("crop_scale", (0.5, 0.2)),
        ("crop_scale", (0.5, 1.5)),
        ("crop_ratio", (0.0, 1.0)),
        ("crop_ratio", (2.0, 1.0)),
        ("flip", 1.5),
        ("flip", float("nan")),
        ("std", (1.0, 0.0, 1.0)),
    ],
)
def test_preprocessing_that_makes_no_sense_is_refused(field, value):
    with pytest.raises(InputError, match=f"^{field}: ") as error:
        Preprocess(**{"image_size": 32, field: value})
    assert "\n" not in str(error.value)
