"""An image becomes the pixels that torchvision's transforms make of it, or is refused before it does harm."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from fcljax.data.augment import Geometry
from fcljax.data.files.images import MAX_PIXELS, centre, decode, fits, quiet, size_of
from fcljax.errors import InputError

BICUBIC, BILINEAR = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR


def noise(width, height, seed=0):
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3), np.uint8))


def content(image, format="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, *chunks):
    """A PNG of that size by its header; without pixels unless `chunks` bring them."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def pixels_of(width, height):
    return chunk(b"IDAT", zlib.compress(bytes((1 + 3 * width) * height)))


def refusal(picture):
    with quiet(), pytest.raises(InputError) as error:
        decode(picture, "cat.png")
    assert "\n" not in str(error.value) and "cat.png" in str(error.value)
    return str(error.value)


def resize_and_centre_crop(image, side, kernel):
    """torchvision.transforms.Resize(side) and CenterCrop(side), written out."""
    width, height = image.size
    if width <= height:
        width, height = side, int(side * height / width)
    else:
        width, height = int(side * width / height), side
    top, left = int(round((height - side) / 2.0)), int(round((width - side) / 2.0))
    return np.asarray(image.resize((width, height), kernel).crop((left, top, left + side, top + side)))


@settings(max_examples=60)
@example(2, 41, 3, "bicubic")  # narrower than 1:20
@given(st.integers(2, 90), st.integers(2, 90), st.integers(1, 70), st.sampled_from(["bicubic", "bilinear"]))
def test_test_images_are_resized_and_cropped_as_torchvision_does(width, height, side, kernel):
    image = noise(width, height)
    _, fit = fits(Geometry(test=side, kernel=kernel))
    ours = decode(content(image), "a", fit)
    theirs = resize_and_centre_crop(image, side, {"bicubic": BICUBIC, "bilinear": BILINEAR}[kernel])
    np.testing.assert_array_equal(ours.pixels, theirs)
    assert (ours.height, ours.width) == (height, width)


def test_the_crop_offset_rounds_half_to_even():
    image = noise(341, 256)  # (341 - 256) / 2 = 42.5
    np.testing.assert_array_equal(centre(image, 256), np.asarray(image)[:, 42 : 42 + 256])


@pytest.mark.parametrize("kernel, filter", [("bicubic", BICUBIC), ("bilinear", BILINEAR)])
def test_squashed_test_images_keep_nothing_of_their_shape(kernel, filter):
    image = noise(50, 30)
    _, fit = fits(Geometry(test=20, squash=True, kernel=kernel))
    np.testing.assert_array_equal(
        decode(content(image), "a", fit).pixels, np.asarray(image.resize((20, 20), filter))
    )


@pytest.mark.parametrize("kernel", ["bicubic", "bilinear"])
def test_training_images_are_squeezed_with_the_bicubic_kernel(kernel):
    image = noise(50, 30)
    fit, _ = fits(Geometry(train=24, test=20, kernel=kernel))
    decoded = decode(content(image), "a", fit)
    np.testing.assert_array_equal(decoded.pixels, np.asarray(image.resize((24, 24), BICUBIC)))
    assert (decoded.height, decoded.width) == (30, 50)


@pytest.mark.parametrize("size", [(2, 2_000_000), (2_000_000, 2)])
def test_a_sliver_does_not_fill_the_memory(size):
    assert centre(Image.new("RGB", size, (1, 2, 3)), 64).size == (64, 64)


def test_decoded_pixels_are_fitted_like_files():
    image = noise(40, 20)
    _, fit = fits(Geometry(test=16))
    np.testing.assert_array_equal(
        decode(np.asarray(image), "a", fit).pixels, decode(content(image), "a", fit).pixels
    )
    gray = np.asarray(image)[..., :1]
    assert (decode(gray, "a").pixels == gray).all() and decode(gray, "a").pixels.shape == (20, 40, 3)
    assert size_of(gray, "a") == size_of(content(image), "a") == (20, 40)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "BMP", "WEBP"])
def test_the_content_says_what_an_image_is_and_not_the_name(tmp_path, format):
    (tmp_path / "a.jpg").write_bytes(content(Image.new("RGB", (9, 7), (255, 255, 255)), format))
    decoded = decode(tmp_path / "a.jpg", "a.jpg")
    assert decoded.pixels.shape == (7, 9, 3) and (decoded.pixels == 255).all()


@pytest.mark.parametrize("format", ["TIFF", "EPS", "PPM", "ICO"])
def test_other_formats_are_refused(format):
    assert "is not a readable image (no JPEG, PNG" in refusal(content(noise(16, 16), format))


@pytest.mark.parametrize(
    "mode, format, options",
    [
        ("L", "PNG", {}),
        ("LA", "PNG", {}),
        ("P", "PNG", {"transparency": bytes([0, 9])}),
        ("RGBA", "PNG", {}),
        ("1", "PNG", {}),
        ("CMYK", "JPEG", {}),
    ],
)
def test_images_of_all_8_bit_modes_become_rgb(mode, format, options):
    image = Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode)
    assert (decode(content(image, format, **options), "a").pixels == 255).all()


def test_images_of_16_bits_are_refused():
    assert "mode 'I;16'; convert it to 8 bits" in refusal(
        content(Image.fromarray(np.full((8, 8), 40000, np.uint16)))
    )


@pytest.mark.parametrize(
    "bad",
    [b"", b"not an image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"RIFF\0\0\0\0WEBP"],
)
def test_what_is_no_image_is_refused(bad):
    assert "is not a readable image" in refusal(bad)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "BMP"])
def test_a_truncated_image_is_refused(format):
    whole = content(noise(40, 40), format)
    assert "is not a readable image" in refusal(whole[: len(whole) // 2])


@pytest.mark.parametrize("size", [(1, 1), (1, 30), (30, 1)])
def test_a_side_of_one_pixel_is_refused(size):
    assert f"is too small, {size[0]}x{size[1]} pixels" in refusal(content(noise(*size)))


def test_forty_megapixels_are_refused_by_the_header_and_one_row_less_is_not():
    rows = MAX_PIXELS // 8000
    assert f"is too large, 8000x{rows} pixels" in refusal(png(8000, rows))
    assert size_of(png(8000, rows - 1, pixels_of(1, 1)), "a") == (rows - 1, 8000)


@pytest.mark.parametrize("side", [10_000, 60_000])  # Pillow warns from 89 megapixels and refuses from 179
def test_a_decompression_bomb_is_refused_without_a_warning(side):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "is too large" in refusal(png(side, side, pixels_of(1, 1)))
    assert not caught


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP", b"iTXt"])
@pytest.mark.parametrize("before", [True, False])
def test_a_bomb_in_the_metadata_is_refused_without_a_warning(kind, before):
    head = b"bomb\0\1\0\0\0" if kind == b"iTXt" else b"bomb\0\0"
    bomb = chunk(kind, head + zlib.compress(bytes(1 << 25)))
    parts = (bomb, pixels_of(4, 4)) if before else (pixels_of(4, 4), bomb)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "is not a readable image" in refusal(png(4, 4, *parts))
    assert not caught


def test_odd_metadata_of_a_sound_image_gives_no_warning():
    odd = png(4, 4, chunk(b"acTL", struct.pack(">II", 0, 0)), pixels_of(4, 4))  # an animation of no frames
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet():
            assert decode(odd, "a").pixels.shape == (4, 4, 3)
    assert not caught


@settings(max_examples=150)
@given(st.sampled_from(["JPEG", "PNG", "GIF", "BMP", "WEBP"]), st.data())
def test_a_damaged_image_is_decoded_or_refused_in_one_line(format, data):
    damaged = bytearray(content(noise(8, 8), format))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        with quiet():
            assert decode(bytes(damaged), "cat.png").pixels.dtype == np.uint8
    except InputError as error:
        assert "\n" not in str(error) and "cat.png" in str(error)
