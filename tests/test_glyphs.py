"""The rendered alphabets: no digits, no look-alikes, images that depend on seed, character and index only."""

import unicodedata

import numpy as np
import pytest

from fcljax.data.glyphs import (
    FONTS,
    GLYPHS,
    PRETRAIN,
    Style,
    _characters,
    glyph_fields,
    glyphs,
    outline,
    render,
    sample_glyphs,
)
from fcljax.errors import InputError

FEW = GLYPHS[:10]


@pytest.fixture(scope="module")
def few():
    return glyphs(30, 10, seed=3, chars=FEW)


def nearest_mean(x, y, x_test, y_test):
    flat = lambda images: (
        images[..., 0].reshape(len(images), -1) / 255 - images[..., 0].mean((1, 2))[:, None] / 255
    )
    means = np.stack([flat(x[y == c]).mean(0) for c in range(y.max() + 1)])
    distance = ((flat(x_test)[:, None] - means[None]) ** 2).sum(-1)
    return (distance.argmin(1) == y_test).mean()


@pytest.mark.parametrize("alphabet", [PRETRAIN, GLYPHS])
def test_no_character_is_numeric_in_any_sense_of_unicode(alphabet):
    assert not [
        c
        for c in alphabet
        if unicodedata.category(c).startswith("N") or unicodedata.numeric(c, None) is not None
    ]
    assert not [
        c
        for c in alphabet
        if {"DIGIT", "NUMBER", "NUMERAL", "FRACTION", "TONE"} & set(unicodedata.name(c).split())
    ]


def test_the_alphabets_are_disjoint_and_have_600_and_100_classes():
    assert (len(set(PRETRAIN)), len(PRETRAIN)) == (600, 600)
    assert (len(set(GLYPHS)), len(GLYPHS)) == (100, 100)
    assert not set(PRETRAIN) & set(GLYPHS)


def test_no_two_characters_look_the_same_and_none_looks_like_a_digit():
    looks = np.stack([outline(c) for c in "0123456789" + PRETRAIN + GLYPHS])
    alike = looks @ looks.T
    np.fill_diagonal(alike, 0)
    alike[:10, :10] = 0
    assert alike.max() < 0.9 + 1e-3


def test_look_alikes_across_scripts_would_be_noticed():
    assert outline("A") @ outline("\u0391") > 0.99  # Greek Alpha
    assert outline("A") @ outline("\u0410") > 0.99  # Cyrillic A
    assert outline("A") @ outline("K") < 0.9


def test_every_glyph_class_comes_from_at_least_eight_fonts():
    known = [_characters(font) for font in FONTS]
    fonts = [sum(char in each for each in known) for char in GLYPHS]
    assert min(fonts) >= 8
    assert [*glyph_fields(GLYPHS[::25]).number] == fonts[::25]  # one field for each


def test_rendering_twice_gives_the_same_images():
    first, second = render(FEW, 3, seed=1), render(FEW, 3, seed=1)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    assert first[0].dtype == np.uint8 and first[0].shape == (30, 32, 32, 3) and first[1].dtype == np.int64


def test_asking_for_more_images_leaves_the_first_ones_as_they_are():
    small, large = (render(FEW[:2], count, seed=5)[0].reshape(2, count, 32, 32, 3) for count in (3, 300))
    np.testing.assert_array_equal(small, large[:, :3])


def test_images_of_a_class_do_not_depend_on_the_other_classes():
    np.testing.assert_array_equal(render(FEW[3], 4, seed=5)[0], render(FEW, 4, seed=5)[0][12:16])


def test_another_seed_gives_other_images():
    assert (render(FEW[0], 4, seed=1)[0] != render(FEW[0], 4, seed=2)[0]).any((1, 2, 3)).all()


def test_training_and_test_images_are_all_different(few):
    images = np.concatenate([few[0], few[2]]).reshape(400, -1)
    assert len(np.unique(images, axis=0)) == 400


def test_more_training_images_leave_the_test_images_as_they_are(few):
    np.testing.assert_array_equal(glyphs(1, 10, seed=3, chars=FEW)[2], few[2])


def test_no_image_is_constant_and_channels_are_equal(few):
    x = few[0]
    assert x.std((1, 2, 3)).min() > 2
    np.testing.assert_array_equal(x[..., 0], x[..., 1])
    np.testing.assert_array_equal(x[..., 0], x[..., 2])


def test_both_polarities_occur(few):
    border = np.concatenate([few[0][:, 0, :, 0], few[0][:, -1, :, 0]], axis=1).mean(1)
    assert 0.1 < (border > 128).mean() < 0.5


def test_labels_are_sorted_and_balanced(few):
    np.testing.assert_array_equal(few[1], np.repeat(np.arange(10), 30))
    np.testing.assert_array_equal(few[3], np.repeat(np.arange(10), 10))


def test_clean_classes_are_separable_by_their_pixels():
    still = Style(
        rotation=3.0,
        slant=0.05,
        scale=(0.8, 0.9),
        aspect=0.05,
        shift=0.0,
        perspective=0.0,
        elastic=0.05,
        resolution=(12, 16),
        dark_on_light=0.0,
    )
    fields, rng = glyph_fields(GLYPHS[:20]), np.random.default_rng(0)
    y, y_test = np.repeat(np.arange(20), 30), np.repeat(np.arange(20), 10)
    x, x_test = (
        np.repeat(sample_glyphs(fields, label, rng, style=still)[..., None], 3, -1) for label in (y, y_test)
    )
    assert nearest_mean(x, y, x_test, y_test) > 0.7  # chance is 0.05


def test_distorted_classes_are_above_chance_and_harder_than_clean_ones(few):
    assert 0.15 < nearest_mean(*few) < 0.9  # chance is 0.1


@pytest.mark.parametrize("size", [8, 28, 48])
def test_images_come_in_the_size_asked_for(size):
    assert render(FEW[0], 2, seed=0, size=size)[0].shape == (2, size, size, 3)


def test_zero_images_are_an_empty_set():
    x, y = render(FEW, 0, seed=0)
    assert x.shape == (0, 32, 32, 3) and y.shape == (0,)


def test_bad_requests_are_named():
    with pytest.raises(InputError, match="fonts: unknown value 'DejaVuSan'; did you mean 'DejaVuSans'"):
        render("A", 1, 0, fonts=["DejaVuSan"])
    with pytest.raises(InputError, match=r"U\+4E00"):
        render("\u4e00", 1, 0)
    with pytest.raises(InputError, match="train_per_class: must be at least 0, not -1"):
        glyphs(-1, 1)
    with pytest.raises(InputError, match="size: must be at least 8, not 4"):
        glyphs(1, 1, size=4)
