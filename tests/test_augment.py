"""Crops and resizes inside jit are those of Pillow, and depend on nothing but the image and its key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance
from sklearn.datasets import load_sample_images

from fcljax.data.augment import (
    MARGIN,
    PIPELINES,
    Geometry,
    Preprocess,
    clean_view,
    crop_resize,
    input_pipeline,
    sample_crops,
    train_view,
)
from fcljax.errors import InputError
from fcljax.pixels import NORMALISE

PHOTOS = np.stack(load_sample_images().images)  # two photographs, 427 x 640

train = jax.jit(train_view, static_argnums=0)
clean = jax.jit(clean_view, static_argnums=0)
crop = jax.jit(crop_resize, static_argnums=3)
_crops = jax.jit(sample_crops, static_argnums=0)


def crops(preprocess, height, width, keys):
    return _crops(preprocess, jnp.tile(jnp.array([height, width]), (len(keys), 1)), keys)


def patches(side, count=4):
    """Parts of a photograph."""
    corners = np.random.RandomState(side).randint(0, 427 - side, (count, 2))
    return np.stack(
        [PHOTOS[i % 2, top : top + side, left : left + side] for i, (top, left) in enumerate(corners)]
    )


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
    cut = (
        Image.fromarray(image)
        .crop((left, top, left + cols, top + rows))
        .resize((size, size), Image.Resampling.BILINEAR)
    )
    return np.asarray(cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else cut, np.float32)


def assert_grey_levels_match(ours, theirs, share=0.1):
    """No value is more than a level off, and few are: Pillow's 22-bit weights round halves either way."""
    difference = np.abs(np.asarray(ours) - theirs)
    assert difference.max() <= 1.001
    assert (difference > 0.5).mean() < share


def test_the_short_side_is_256_for_224():
    assert Preprocess(224).resized == 256
    assert Preprocess(64).resized == 73


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
def test_the_clean_view_is_pillows_to_the_last_grey_level(images, size):
    ours = np.asarray(clean(Preprocess(size), images)) * 255
    np.testing.assert_array_equal(np.rint(ours), np.stack([pillow_clean(image, size) for image in images]))


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
    theirs = np.stack(
        [pillow_crop(*row, 64) for row in zip(images, np.asarray(boxes), np.asarray(flips), strict=True)]
    )
    assert_grey_levels_match(train(Preprocess(64), images, keys(4)) * 255, theirs)


@pytest.mark.parametrize(
    "box", [(0, 0, 32, 32), (0, 0, 1, 1), (31, 31, 1, 1), (0, 5, 32, 1), (3, 0, 2, 32), (7, 9, 11, 13)]
)
def test_the_smallest_and_the_largest_boxes_are_pillows_too(box):
    images = patches(32, 1)
    for flip in (False, True):
        assert_grey_levels_match(
            crop(images, jnp.array([box]), jnp.array([flip]), 24)[0], pillow_crop(images[0], box, flip, 24)
        )


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
    np.testing.assert_allclose(clean(Preprocess(32, margin=1.0), images) * 255, images, rtol=1e-6)
    np.testing.assert_allclose(
        clean(Preprocess(28, margin=32 / 28), images) * 255, images[:, 2:30, 2:30], rtol=1e-6
    )


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
    views = np.concatenate([train(Preprocess(64), images, keys(4, seed)) for seed in range(5)]).reshape(
        20, -1
    )
    assert len(np.unique(views, axis=0)) == 20
    same = np.asarray(train(Preprocess(64), images, jnp.repeat(keys(1), 4))).reshape(4, -1)
    assert len(np.unique(same, axis=0)) == 1


@pytest.mark.parametrize("shape, scale", [((20, 60), (0.5, 1.0)), ((7, 100), (1e-4, 1e-3))])
def test_boxes_lie_within_the_image(shape, scale):
    height, width = shape
    boxes, _ = crops(Preprocess(32, crop_scale=scale), height, width, keys(5000))
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
    np.testing.assert_allclose(
        np.quantile(area, [0.1, 0.5, 0.9]), np.quantile(reference[:, 0], [0.1, 0.5, 0.9]), atol=0.02
    )
    np.testing.assert_allclose(
        np.quantile(ratio, [0.1, 0.5, 0.9]), np.quantile(reference[:, 1], [0.1, 0.5, 0.9]), atol=0.02
    )
    assert abs((top / np.maximum(256 - rows, 1))[rows < 200].mean() - 0.5) < 0.02
    assert abs((left / np.maximum(256 - cols, 1))[cols < 200].mean() - 0.5) < 0.02
    assert abs(np.mean(flips) - 0.5) < 0.02


def reference_crops(count, height, width, least=0.05):
    """The rule in plain Python: area share and ratio of the first fitting draw out of ten."""
    rng, found = np.random.RandomState(0), []
    for _ in range(count):
        for _ in range(10):
            area, ratio = (
                height * width * rng.uniform(least, 1),
                np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3))),
            )
            rows, cols = round(np.sqrt(area / ratio)), round(np.sqrt(area * ratio))
            if 0 < cols <= width and 0 < rows <= height:
                found.append((rows * cols / (height * width), cols / rows))
                break
    return np.array(found)


@pytest.mark.parametrize(
    "height, width, ratio, box",
    [
        (100, 20, (3 / 4, 4 / 3), (36, 0, 27, 20)),  # too tall: the nearest ratio is 20 / 27 ~ 3 / 4
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
    ours = clean(Preprocess(32, mean=mean, std=std, margin=1.0), images)
    np.testing.assert_allclose(ours, (images / 255 - np.array(mean)) / np.array(std), atol=1e-6)


# ---- images that were squeezed into a square before they were stored ---------------------------------------


def squeezed(images, side):
    stored = np.stack(
        [
            np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC))
            for image in images
        ]
    )
    return stored, jnp.array([image.shape[:2] for image in images])


def test_images_that_were_not_squeezed_need_no_sizes():
    images, key = patches(40), keys(4)
    square = jnp.full((4, 2), 40)
    np.testing.assert_array_equal(
        train(Preprocess(32), images, key, square), train(Preprocess(32), images, key)
    )
    ties = 2.1 / 255
    np.testing.assert_allclose(
        clean(Preprocess(32), images, square), clean(Preprocess(32), images), atol=ties
    )


def test_crops_of_squeezed_images_are_those_of_the_originals_but_for_sharpness():
    """The same boxes in the same pixels: half of the detail is lost, and nothing is displaced."""
    originals = [PHOTOS[0], PHOTOS[1].transpose(1, 0, 2)]
    stored, sizes = squeezed(originals, 320)
    boxes, flips = _crops(Preprocess(64), sizes, keys(2))
    theirs = np.stack(
        [pillow_crop(*row, 64) for row in zip(originals, np.asarray(boxes), np.asarray(flips), strict=True)]
    )
    ours = np.asarray(train(Preprocess(64), stored, keys(2), sizes)) * 255
    assert np.abs(ours - theirs).mean() < 3
    moved = np.asarray(crop(stored, boxes + jnp.array([8, 8, 0, 0]), flips, 64, sizes))
    assert np.abs(ours - theirs).mean() < 0.4 * np.abs(moved - theirs).mean()


def test_the_clean_view_of_squeezed_images_restores_their_shape():
    originals = [PHOTOS[0], PHOTOS[1].transpose(1, 0, 2)]
    stored, sizes = squeezed(originals, 427)
    ours = np.asarray(clean(Preprocess(64), stored, sizes)) * 255
    theirs = np.stack([pillow_clean(image, 64) for image in originals])
    assert np.abs(ours - theirs).mean() < 1.5
    assert np.abs(ours - np.asarray(clean(Preprocess(64), stored)) * 255).mean() > 10


def test_a_box_between_two_stored_pixels_reads_the_pixel_it_lies_in():
    image = np.arange(16, dtype=np.uint8).reshape(1, 4, 4, 1) * np.ones(3, np.uint8)
    cut = crop(image, jnp.array([[90, 30, 1, 1]]), jnp.array([False]), 2, jnp.array([[100, 100]]))
    np.testing.assert_array_equal(cut, np.full((1, 2, 2, 3), 13))  # row 3.6, column 1.2


# ---- the papers' pipelines ---------------------------------------------------------------------------------


def pillow_resize(image, rows, cols, kernel):
    return Image.fromarray(image).resize((cols, rows), getattr(Image.Resampling, kernel.upper()))


def pillow_release(name, image, size):
    """The test transform of each release, up to its normalisation."""
    if name in ("fppl", "pmae"):
        return pillow_clean(image, size)
    if name == "pilora":  # Resize(size), bilinear; its images are square
        return np.asarray(pillow_resize(image, size, size, "bilinear"), np.float32)
    if name == "hepco":  # Resize((size, size))
        return np.asarray(pillow_resize(image, size, size, "bilinear"), np.float32)
    # Resize((256, 256)), CenterCrop(224)
    resized = pillow_resize(image, int(MARGIN * size), int(MARGIN * size), "bilinear")
    corner = round((resized.width - size) / 2)
    return np.asarray(resized.crop((corner, corner, corner + size, corner + size)), np.float32)


def greys(preprocess, view):
    return (np.asarray(view) * np.array(preprocess.std) + np.array(preprocess.mean)) * 255


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("side", [32, 400])
def test_the_test_images_of_every_release_are_pillows(name, side):
    images = patches(side, 2)
    preprocess = input_pipeline(name, 224)
    theirs = np.stack([pillow_release(name, image, 224) for image in images])
    np.testing.assert_array_equal(np.rint(greys(preprocess, clean(preprocess, images))), theirs)


@pytest.mark.parametrize("name", ["hepco", "hepco_domainnet"])
def test_hepco_squashes_photographs(name):
    preprocess = input_pipeline(name, 64)
    theirs = np.stack([pillow_release(name, image, 64) for image in PHOTOS])
    np.testing.assert_array_equal(np.rint(greys(preprocess, clean(preprocess, PHOTOS))), theirs)


@pytest.mark.parametrize(
    ("name", "least"), [("fppl", 0.05), ("pmae", 0.05), ("hepco", 0.08), ("hepco_domainnet", 0.08)]
)
def test_the_training_crops_of_a_release_cover_its_range_of_areas(name, least):
    boxes, _ = crops(input_pipeline(name, 224), 256, 256, keys(3000))
    area = np.prod(np.asarray(boxes)[:, 2:], axis=1) / 256**2
    assert least - 0.002 < area.min() < least + 0.01 and area.max() > 0.95
    reference = reference_crops(3000, 256, 256, least)[:, 0]
    np.testing.assert_allclose(
        np.quantile(area, [0.1, 0.5, 0.9]), np.quantile(reference, [0.1, 0.5, 0.9]), atol=0.025
    )


def test_pilora_trains_on_whole_images_flipped_and_brightened_as_pillow_does():
    images = 60 + patches(32, 64) // 2  # far enough from black and white to see the factor
    preprocess = input_pipeline("pilora", 48)
    views = greys(preprocess, train(preprocess, images, keys(64)))
    _, flips = crops(preprocess, 32, 32, keys(64))
    factors = [
        1 + 63 / 255 * float(jax.random.uniform(jax.random.fold_in(key, 1), minval=-1.0)) for key in keys(64)
    ]
    for image, view, flip, factor in zip(images, views, np.asarray(flips), factors, strict=True):
        plain = pillow_resize(image, 48, 48, "bilinear")
        plain = plain.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else plain
        off = np.abs(np.rint(view) - np.asarray(ImageEnhance.Brightness(plain).enhance(factor), np.float32))
        assert off.max() <= 2 and (off > 0).mean() < 0.15  # ties of the resize, brightened
    low, high = 1 - 63 / 255, 1 + 63 / 255
    assert low - 0.01 < min(factors) < low + 0.05 and high - 0.05 < max(factors) < high + 0.01


def test_brightness_does_not_change_the_crops():
    dark = Preprocess(32, brightness=0.5)
    np.testing.assert_array_equal(crops(dark, 40, 40, keys(8))[0], crops(Preprocess(32), 40, 40, keys(8))[0])
    black = np.zeros((2, 40, 40, 3), np.uint8)
    np.testing.assert_array_equal(train(dark, black, keys(2)), np.zeros((2, 32, 32, 3)))


def test_what_is_stored_for_a_release_is_what_its_test_view_wants():
    assert input_pipeline("fppl", 224).geometry == Geometry(256, 256, False, "bicubic")
    assert input_pipeline("pilora", 224).geometry == Geometry(256, 224, False, "bilinear")
    assert input_pipeline("hepco", 224).geometry == Geometry(256, 224, True, "bilinear")
    assert input_pipeline("hepco_domainnet", 224).geometry == Geometry(256, 256, True, "bilinear")
    for name in PIPELINES:  # images stored as the geometry says are not resampled again
        preprocess = input_pipeline(name, 56)
        side = preprocess.geometry.test
        images = patches(side, 2)
        corner = round((side - 56) / 2)
        cut = images[:, corner : corner + 56, corner : corner + 56]
        np.testing.assert_allclose(greys(preprocess, clean(preprocess, images)), cut, atol=1e-3)


def test_letters_that_fill_their_frame_lose_no_border():
    images = patches(32, 2)
    views = greys(
        input_pipeline("fppl", 32, fills_frame=True),
        clean(input_pipeline("fppl", 32, fills_frame=True), images),
    )
    np.testing.assert_allclose(views, images, atol=1e-3)


def test_an_unknown_pipeline_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="preprocess: unknown value 'hepko'; did you mean 'hepco'?"):
        input_pipeline("hepko", 224)


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
        ("margin", 0.99),
        ("brightness", -0.1),
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
