"""Render glyph images: a data set of any size with two disjoint alphabets, from
matplotlib's fonts.

`PRETRAIN` (600 letters and symbols) is for training backbones. `GLYPHS` (100 Armenian
and Georgian letters) is for class-incremental runs and for validating a backbone on
classes it has never seen. Neither contains a digit or numeral of any script, nor a
character that DejaVu Sans draws like a digit.

Every letter is rendered once per font into a signed distance field, so that stroke
weight is a threshold and warps stay smooth. An image is one batched gather (rotation,
slant, scale, perspective and elastic warp at once) and two small matrix products (blur
and low resolution): about 20,000 images a second on one core. The n-th image of a class
depends on seed, character, fonts, size, style and n only.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from fontTools.ttLib import TTFont
from jaxtyping import Float, Float32, Int, Int16, Int64, UInt8
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from scipy import ndimage

from fcljax.errors import InputError, choose

# Chosen greedily (letters before symbols, Latin before Greek before Cyrillic before the
# rest) among characters that at least 3 fonts have, are not numeric in any sense of
# Unicode and carry no diacritic. A character is left out if its `outline` correlates
# above 0.9 (0.85 for symbols, 0.82 for Canadian syllabics) with that of a digit or of a
# character already chosen. GLYPHS are the 100 most distinct ones, by the same rule, of
# the Armenian and Georgian letters that at least 8 fonts have.
PRETRAIN = (
    "ACDEFGHIJKLMNOPQRTUVWXYZabdefkmnpqrstuyÆÐÞßæðŊƐƕƪɐɔɘɞɣɩɮɯɶɷɸɹʁʇʉʊʌʍʎʔʕʖʗʙʚʜʞʣʤʦʧꜧƍƏƜƢƣƦƩƷƸǶȜȸȹɁɄʩʪʫʬ"
    "ʭᴔᴖᴗᴝᴞᴟⱵⱷꜦꞍȢȣɂᴃᴎᴑᴒᴙᴚẞỺỻꜢꜤꜨꜩꜲꜴꜶꜷꜸꜹꜼꜽꝆꞀꞂꟻꟼꟽꟿᴕΓΔΞΦΨΩαβζκλμνξπςφωϘϚϝϞϟϠϡϗϺϻͲͳͶͼϏЂЉЋЏБДЖЛЦЩЪЫЭЮЯпфъыьђњћѢ"
    "ѣѪҺӋѤѬѰҌҍҠԔꙄꙔꙖꙗѦѨѮѸѹѾҀҨҼԀԂԄԅԆԉԎԏԖԗԘꙌꙢꙤꙦꙪꙫꙮꚍꚕℲກຂຄງຈຊຍດຕຖທນບປຜຝພມຣລວສຫອຮຯະາϢϦϧϩϪϬϮ\u05d0\u05d1\u05d2"
    "\u05d4\u05da\u05dc\u05dd\u05de\u05e2\u05e3\u05e4\u05e5\u05e6\u05e7\u05e8\u05e9\u05eaຽເແໃໄᐄᐅᐆᐊᐋᐌᐍᐎᐒᐓᐔ"
    "ᐕᐗᐘᐚᐟᐠᐥᐩᐫᐬᐮᐷᐽᐿᑁᑑᑖᑗᑘᑙᑚᑛᑜᑠᑡᑢᑣᑤᑮᑱᑴᑵᑶᑷᑸᑹᑺᑻᒁᒊᒒᒔᒕᒘᒙᒚᒝᒠᒱᓀᓁᓃᓄᓅᓇᓈᓊᓋᓓᓔᓕᓖᓗᓘᓚᓛᓝᓞᓣᓦᓬᓮᓴᓶᓷᓸᓹᓾᓿᔂᔃᔄᔐᔑᔒᔓᔕᔗᔘᔙᔚᔜᔝᔞᔣᔤᔦᔧᔨᔪ"
    "ᔬᔭᔯᔰᔱᔲᔳᔴᔵᔶᔷᔹᔺᔻᔼᕂᕅᕎᕏᕒᕗᕙᕠᕢᕪᕾᕿᖁᖂᖃᖅᖊᖎᖏᖓᖔᖕᖖᖢᖣᖤᖥᖮᙯᙰᙱᙳ\U00010302\U00010303\U00010304\U00010305\U00010308"
    "\U0001030b\U0001030c\U0001030d\U0001030e\U00010311\U00010312\U00010314\U00010315\U00010316\U00010319"
    '\U0001031a\U0001031c\U0001031d"$&,<=>@£¤§¬±¶¿×€‵←→⇔⇵∈∋∓√∝∟∠∸∹∺≃≐≑≒≓≡≤≥⊂⊆⊇⊏⊐⊔⊗⊟⊠⊢⊣⊥⋄♯◸◹◺◻◼◿‣⁋₦₧₯₹‸⅋∅'
    "∊∔∴∵∷≅≆≎≏≗≙≟≣≦≧≶≷≼⊦⊧⊨⊩⊪⊫⊴⊵⋏⋐⋑⋜⋝⋨⋩⁒⋆⋤⋥⟰⟱⟲⟳⧺⧻⁂⁌⁍₠₪₫₰₲₺₽"
)
GLYPHS = (
    "ԳԴԵԶԷԸԹԺԻԽԿՀՁՃՆՇՊՋՎՐՒՔՖդէթխկմնպջվտրփֆႠႡႥႦႧႩႪႫႮႰႱႲႵႸႻႼႽႿჀჁჃჄაბდთკლორფქღჰჲჴჷჺⴀⴂⴅⴆⴇⴈⴋⴌⴎⴏⴐⴑⴓⴖⴗⴘⴜⴝⴞⴟⴡⴢⴣⴤⴥ"
)

FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10"),
)

_CELL = 64  # pixels per side of a distance field
# Half the side of a field, in half-extents of the glyph. Beyond 1 there is room to
# thicken strokes, and for warps that read outside of the glyph.
_REACH = 1.6
# control points per side of the elastic warp and of the pen pressure
_CONTROL = 4
_UNIT = 1 / 8192  # one step of the int16 distances, in half-extents of the glyph


@dataclasses.dataclass(frozen=True)
class Style:
    """How strongly images are distorted.

    Lengths are in half image sides. Draws from ranges are uniform, and symmetric if one
    bound is given.
    """

    rotation: float = 15.0  # degrees
    slant: float = 0.3  # horizontal shear
    scale: tuple[float, float] = (0.6, 1.0)  # half the longer side of the glyph
    aspect: float = 0.25  # log of the stretch of one axis against the other
    shift: float = 0.12  # translation beyond what keeps the glyph inside
    perspective: float = 0.15  # change of magnification between the centre and a border
    elastic: float = 0.2  # largest displacement of a control point
    stroke: tuple[float, float] = (0.05, 0.2)  # half the stroke width
    pressure: float = 0.35  # relative variation of the stroke width along the strokes
    # pixels per side before scaling up to the image; mostly low
    resolution: tuple[int, int] = (8, 32)
    blur: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5)  # standard deviations in pixels
    contrast: float = 0.45  # least difference between ink and paper, of 1
    noise: float = 0.06  # largest standard deviation of the noise, of 1
    dark_on_light: float = 0.3  # share of images with reversed polarity


class Fields(NamedTuple):
    """Signed distance fields of glyphs (a character in a font), grouped by class.

    The glyphs of class c are first[c] .. first[c] + number[c] - 1.
    """

    # distance to the outline, positive inside, in _UNIT half-extents
    distance: Int16[np.ndarray, "glyphs cell cell"]
    # half the typical stroke width, in half-extents of the glyph
    ink: Float32[np.ndarray, " glyphs"]
    # half the typical space between strokes, in half-extents
    gap: Float32[np.ndarray, " glyphs"]
    first: Int[np.ndarray, " classes"]
    number: Int[np.ndarray, " classes"]


def _font_path(font: str) -> pathlib.Path:
    return pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"


@functools.cache
def _characters(font: str) -> frozenset[str]:
    """Return the characters of a font."""
    with TTFont(_font_path(font), lazy=True) as file:
        characters = {chr(code) for code in file.getBestCmap() or ()}
    # matplotlib's Computer Modern has TeX's encodings: beyond ASCII letters, its code
    # points show other characters
    ascii_only = font.startswith("cm")
    return frozenset(c for c in characters if not ascii_only or c.isascii() and c.isalpha())


def _bitmap(
    char: str,
    font: ImageFont.FreeTypeFont,
    side: int,
    extent: float,
) -> Image.Image:
    """Draw a white character centred in side x side pixels, its longer side `extent`."""
    left, top, right, bottom = font.getbbox(char)
    ink = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2))
    ImageDraw.Draw(ink).text((1 - left, 1 - top), char, fill=255, font=font)
    # the font's box may have margins, and the glyph must be centred by what is drawn
    ink = ink.crop(ink.getbbox())
    width, height = (max(1, round(length * extent / max(ink.size))) for length in ink.size)
    scaled = ink.resize((width, height), Image.Resampling.BOX)
    image = Image.new("L", (side, side))
    image.paste(scaled, ((side - width) // 2, (side - height) // 2))
    return image


def outline(char: str) -> Float[np.ndarray, " 576"]:
    """Return a character in DejaVu Sans, blurred, 24 x 24, with mean 0 and norm 1.

    The inner product of two outlines is their correlation, by which `PRETRAIN` and
    `GLYPHS` are chosen.
    """
    font = ImageFont.truetype(_font_path("DejaVuSans"), 64)
    # a shift by a pixel must not make the same letter look like another
    image = _bitmap(char, font, 24, 20.0).filter(ImageFilter.GaussianBlur(1.3))
    pixels = np.asarray(image, dtype=np.float64).ravel()
    centred = pixels - pixels.mean()
    return centred / np.linalg.norm(centred)


def _field(char: str, font: ImageFont.FreeTypeFont) -> tuple[np.ndarray, float, float]:
    """Return the distance field of a glyph, half its stroke width and half its gap."""
    half_extent = _CELL / _REACH
    # at twice the resolution and then pooled, because distances from a bitmap have steps
    inside = np.asarray(_bitmap(char, font, 2 * _CELL, 2 * half_extent)) > 127
    to_border = np.asarray(ndimage.distance_transform_edt(inside))
    from_border = np.asarray(ndimage.distance_transform_edt(~inside))
    distance = (to_border - from_border) / half_extent
    rows = np.nonzero(inside.any(1))[0]
    columns = np.nonzero(inside.any(0))[0]
    box = distance[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    # the mean distance inside a bar is half of its half-width
    ink = 2 * box[box > 0].mean()
    gap = ink
    if (box < 0).any():
        gap = -2 * box[box < 0].mean()
    pooled = distance.reshape(_CELL, 2, _CELL, 2).mean((1, 3))
    # int16 takes half of the memory of float32
    return np.round(np.clip(pooled, -2, 2) / _UNIT).astype(np.int16), ink, gap


def glyph_fields(chars: str, fonts: Sequence[str] = FONTS) -> Fields:
    """Compute distance fields of `chars` in all `fonts` that have them, 1 ms each.

    Class c is chars[c].

    Raises:
      InputError: for an unknown font, or a character that no font has.
    """
    names = [choose("fonts", font, FONTS) for font in fonts]
    loaded = [(_characters(name), ImageFont.truetype(_font_path(name), 96)) for name in names]
    glyphs = []
    number = []
    for char in chars:
        of_char = [_field(char, font) for characters, font in loaded if char in characters]
        if not of_char:
            raise InputError(f"chars: no font of {', '.join(names)} has {char!r} (U+{ord(char):04X})")
        glyphs += of_char
        number.append(len(of_char))
    distance, ink, gap = zip(*glyphs, strict=True)
    # where each class begins in the stacked fields
    first = np.cumsum(number) - number
    ink = np.asarray(ink, np.float32)
    gap = np.asarray(gap, np.float32)
    return Fields(np.stack(distance), ink, gap, first, np.array(number))


class _Draws(NamedTuple):
    """Uniform numbers in [0, 1), one per image; `warp` and `press` have one per control
    point."""

    font: np.ndarray
    rotation: np.ndarray
    slant: np.ndarray
    scale: np.ndarray
    aspect: np.ndarray
    shift_x: np.ndarray
    shift_y: np.ndarray
    tilt_x: np.ndarray
    tilt_y: np.ndarray
    elastic: np.ndarray
    stroke: np.ndarray
    pressure: np.ndarray
    resolution: np.ndarray
    blur: np.ndarray
    paper: np.ndarray
    ink: np.ndarray
    gamma: np.ndarray
    noise: np.ndarray
    polarity: np.ndarray
    warp: np.ndarray
    press: np.ndarray


_SCALARS = len(_Draws._fields) - 2
_COLUMNS = _SCALARS + 3 * _CONTROL**2


def _split(uniform: np.ndarray) -> _Draws:
    points = uniform[:, _SCALARS:].reshape(-1, 3, _CONTROL, _CONTROL)
    return _Draws(*uniform[:, :_SCALARS].T, warp=points[:, :2], press=points[:, 2])


def _between(uniform: np.ndarray, low: float, high: float) -> np.ndarray:
    return low + (high - low) * uniform


def _symmetric(uniform: np.ndarray, bound: float) -> np.ndarray:
    return _between(uniform, -bound, bound)


def _per_image(values: np.ndarray) -> np.ndarray:
    """Reshape [N] to [N, 1, 1]: a number for all pixels of an image."""
    return values[:, None, None]


@functools.lru_cache(maxsize=16)
def _spread(size: int) -> np.ndarray:
    """Return weights [size, control] that spread control points over pixels smoothly."""
    distance = np.linspace(-1, 1, size)[:, None] - np.linspace(-1, 1, _CONTROL)[None]
    weight = np.exp(-0.5 * (distance * _CONTROL / 1.6) ** 2)
    # sums of 1, so that equal control points shift the whole image by their value
    return (weight / weight.sum(1, keepdims=True)).astype(np.float32)


def _shrink(size: int, to: int) -> np.ndarray:
    """Return weights [to, size] of area averaging."""
    low = np.arange(to)[:, None] * size / to
    high = (np.arange(to)[:, None] + 1) * size / to
    pixel = np.arange(size)[None]
    # the overlap of pixels with each output, as a share
    return np.clip(np.minimum(high, pixel + 1) - np.maximum(low, pixel), 0, None) * to / size


def _enlarge(size: int, source: int) -> np.ndarray:
    """Return weights [size, source] of bilinear interpolation between pixel centres."""
    centre = np.clip((np.arange(size) + 0.5) * source / size - 0.5, 0, source - 1)
    return np.clip(1 - np.abs(centre[:, None] - np.arange(source)[None]), 0, None)


def _gauss(size: int, sigma: float) -> np.ndarray:
    if not sigma:
        return np.eye(size)
    return ndimage.gaussian_filter1d(np.eye(size), sigma, axis=0, mode="nearest")


@functools.lru_cache(maxsize=16)
def _lenses(size: int, style: Style) -> np.ndarray:
    """Return matrices [resolutions, blurs, size, size] that blur and rescale one axis."""
    lenses = []
    low, high = style.resolution
    for resolution in range(low, high + 1):
        scaling = np.eye(size)
        if resolution < size:
            scaling = _enlarge(size, resolution) @ _shrink(size, resolution)
        lenses.append([scaling @ _gauss(size, sigma) for sigma in style.blur])
    return np.array(lenses, dtype=np.float32)


def _source(
    draw: _Draws,
    size: int,
    style: Style,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where pixels come from, x and y [N, size, size], and the glyph's scale [N].

    x and y are in half-extents of the glyph.
    """
    axis = ((np.arange(size, dtype=np.float32) + 0.5) * 2 / size - 1).astype(np.float32)
    spread = _spread(size)
    displacement = _symmetric(draw.warp, 2.0) * (draw.elastic * style.elastic)[:, None, None, None]
    warp = spread @ displacement @ spread.T
    tilt_x = _per_image(_symmetric(draw.tilt_x, style.perspective))
    tilt_y = _per_image(_symmetric(draw.tilt_y, style.perspective))
    # magnification changes linearly across the image
    depth = 1 + tilt_x * axis + tilt_y * axis[:, None]
    scale = _between(draw.scale, *style.scale)
    stretch = np.exp(_symmetric(draw.aspect, style.aspect) / 2)
    # a small glyph can move farther before it leaves the image
    margin = np.clip(1 - scale, 0, None) + style.shift
    x = (axis + warp[:, 0]) / depth - _per_image(_symmetric(draw.shift_x, 1.0) * margin)
    y = (axis[:, None] + warp[:, 1]) / depth - _per_image(_symmetric(draw.shift_y, 1.0) * margin)
    angle = np.deg2rad(_symmetric(draw.rotation, style.rotation))
    cos = _per_image(np.cos(angle))
    sin = _per_image(np.sin(angle))
    rotated_x = cos * x + sin * y
    rotated_y = cos * y - sin * x
    slanted_x = rotated_x + _per_image(_symmetric(draw.slant, style.slant)) * rotated_y
    return slanted_x / _per_image(scale * stretch), rotated_y * _per_image(stretch / scale), scale


def _lookup(
    distance: np.ndarray,
    glyph: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
) -> np.ndarray:
    """Sample the glyphs' distances at x, y (half-extents) bilinearly."""
    half = _CELL / 2
    x = np.clip(x * (half / _REACH) + half - 0.5, 0, _CELL - 1.001).astype(np.float32)
    y = np.clip(y * (half / _REACH) + half - 0.5, 0, _CELL - 1.001).astype(np.float32)
    column = x.astype(np.int32)
    row = y.astype(np.int32)
    x = x - column
    y = y - row
    index = (glyph * _CELL**2)[:, None, None] + row * _CELL + column
    # `take` on a flat array is faster in numpy than indexing two axes
    flat = distance.reshape(-1)
    top = flat.take(index) * (1 - x) + flat.take(index + 1) * x
    bottom = flat.take(index + _CELL) * (1 - x) + flat.take(index + _CELL + 1) * x
    return (top + (bottom - top) * y) * np.float32(_UNIT)


def _thickening(
    fields: Fields,
    glyph: np.ndarray,
    draw: _Draws,
    scale: np.ndarray,
    size: int,
    style: Style,
) -> np.ndarray:
    """Return how much to thicken strokes, [N, size, size]."""
    stroke = _between(draw.stroke, *style.stroke)
    ink = fields.ink[glyph]
    gap = fields.gap[glyph]
    # beyond these bounds thin parts would vanish or gaps close
    thickening = np.clip(stroke - ink * scale, -0.2 * ink * scale, 0.5 * gap * scale)
    spread = _spread(size)
    pressure = _symmetric(draw.press, 2.0) * _per_image(draw.pressure * style.pressure * stroke)
    return _per_image(thickening) + spread @ pressure @ spread.T


def _expose(ink: np.ndarray, draw: _Draws, noise: np.ndarray, style: Style) -> np.ndarray:
    """Turn ink into grey levels, both in 0..1."""
    # the clips give half of the images black paper and full ink, as scans have
    slack = (1 - style.contrast) / 2
    paper = np.clip(_symmetric(draw.paper, slack), 0, None)
    full_ink = 1 - np.clip(_symmetric(draw.ink, slack), 0, None)
    gamma = np.exp(_symmetric(draw.gamma, 0.4))
    deviation = np.clip(_symmetric(draw.noise, style.noise), 0, None)
    grey = _per_image(paper) + _per_image(full_ink - paper) * ink ** _per_image(gamma)
    grey = grey + noise * _per_image(deviation)
    return np.where(_per_image(draw.polarity < style.dark_on_light), 1 - grey, grey)


def draw_glyphs(
    fields: Fields,
    label: Int[np.ndarray, " n"],
    uniform: Float32[np.ndarray, "n draws"],
    noise: Float32[np.ndarray, "n size size"],
    style: Style,
) -> UInt8[np.ndarray, "n size size"]:
    """Draw grey images of the classes `label`, each from its uniforms in [0, 1) and its
    normal noise."""
    size = noise.shape[-1]
    draw = _split(uniform)
    glyph = fields.first[label] + (draw.font * fields.number[label]).astype(np.int64)
    x, y, scale = _source(draw, size, style)
    distance = _lookup(fields.distance, glyph, x, y) * _per_image(scale)
    distance = distance + _thickening(fields, glyph, draw, scale, size, style)
    ink = np.clip(0.5 + distance * np.float32(size / 2), 0, 1).astype(np.float32)
    low, high = style.resolution
    # squared: half of all images lie in the lowest quarter of resolutions
    resolution = ((high + 1 - low) * draw.resolution**2).astype(np.int64)
    blur = (draw.blur * len(style.blur)).astype(np.int64)
    lens = _lenses(size, style)[resolution, blur]
    ink = np.clip(lens @ ink @ lens.transpose(0, 2, 1), 0, 1)
    return np.clip(_expose(ink, draw, noise, style) * 255 + 0.5, 0, 255).astype(np.uint8)


def sample_glyphs(
    fields: Fields,
    label: Int[np.ndarray, " n"],
    rng: np.random.Generator,
    size: int = 32,
    style: Style | None = None,
) -> UInt8[np.ndarray, "n size size"]:
    """Draw one random grey image per label from the stream `rng`."""
    uniform = rng.random((len(label), _COLUMNS), dtype=np.float32)
    noise = rng.standard_normal((len(label), size, size), dtype=np.float32)
    return draw_glyphs(fields, label, uniform, noise, style or Style())


def _render_class(
    fields: Fields,
    label: int,
    count: int,
    stream: tuple[int, ...],
    size: int,
    style: Style,
) -> np.ndarray:
    """Render the first `count` images of a class."""
    # A generator fills an array image by image, so more images leave the first ones as
    # they are. Uniforms and noise have streams of their own for the same reason.
    uniform = np.random.default_rng([*stream, 0]).random((count, _COLUMNS), dtype=np.float32)
    noise = np.random.default_rng([*stream, 1]).standard_normal((count, size, size), dtype=np.float32)
    labels = np.full(count, label)
    blocks = [np.zeros((0, size, size), np.uint8)]
    # 256 at a time: memory stays bounded, and intermediate arrays fit into the CPU's
    # cache
    for start in range(0, count, 256):
        block = slice(start, start + 256)
        blocks.append(draw_glyphs(fields, labels[block], uniform[block], noise[block], style))
    return np.concatenate(blocks)


def _check_counts(**fields: tuple[int, int]) -> None:
    """Check fields, given as name=(value, smallest value)."""
    for field, (value, smallest) in fields.items():
        if value < smallest:
            raise InputError(f"{field}: must be at least {smallest}, not {value}")


def _render(
    fields: Fields,
    chars: str,
    count: int,
    stream: tuple[int, ...],
    size: int,
    style: Style,
) -> tuple[np.ndarray, np.ndarray]:
    grey = [
        _render_class(fields, label, count, (*stream, ord(char)), size, style)
        for label, char in enumerate(chars)
    ]
    labels = np.repeat(np.arange(len(chars), dtype=np.int64), count)
    return np.repeat(np.concatenate(grey)[..., None], 3, axis=-1), labels


def render(
    chars: str,
    count_per_class: int,
    seed: int,
    fonts: Sequence[str] = FONTS,
    size: int = 32,
    style: Style | None = None,
) -> tuple[UInt8[np.ndarray, "n size size 3"], Int64[np.ndarray, " n"]]:
    """Render images of `chars`, sorted by class, and labels: label i is chars[i].

    Grey levels are repeated in three channels. The n-th image of a class depends on
    (seed, character, fonts, size, style, n) only: not on count_per_class or the other
    characters.

    Raises:
      InputError: for an unknown font, a character that no font has, or a count, seed or
        size that is too small.
    """
    _check_counts(count_per_class=(count_per_class, 0), seed=(seed, 0), size=(size, 8), chars=(len(chars), 1))
    return _render(glyph_fields(chars, fonts), chars, count_per_class, (seed,), size, style or Style())


def glyphs(
    train_per_class: int,
    test_per_class: int,
    seed: int = 0,
    size: int = 32,
    chars: str = GLYPHS,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Render x_train uint8[N, size, size, 3], y_train int64[N], x_test and y_test.

    Both splits are sorted by class. They come from disjoint random streams, so that one
    can grow without changing the other.

    Raises:
      InputError: for a count, seed or size that is too small.
    """
    _check_counts(
        train_per_class=(train_per_class, 0),
        test_per_class=(test_per_class, 0),
        seed=(seed, 0),
        size=(size, 8),
    )
    fields = glyph_fields(chars)
    train = _render(fields, chars, train_per_class, (seed, 0), size, Style())
    return *train, *_render(fields, chars, test_per_class, (seed, 1), size, Style())
