"""CLIP: class names make the classifier; logits are those of transformers, prompts are the user's, and
classes of later tasks are predicted by their names."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_golden_texts import EXPECTED, TEXT, tensors_of, written

import fcljax
from fcljax import cli, config
from fcljax.errors import InputError
from fcljax.models.clip import ClassTexts, image_features, packaged_tokens, padded, with_features
from fcljax.models.shapes import TEXT_TOWERS
from fcljax.models.text import apply_text
from fcljax.models.vit import Injection, apply_vit
from fcljax.models.weights.pretrained import load_backbone
from fcljax.models.weights.text_towers import class_texts, load_text_tower
from fcljax.runs.class_prompts import prompts_of
from fcljax.runs.inputs import load_split

NAMES = {"class a": 4, "class b": 9}  # and their tokens


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """The folder of a tiny random CLIP."""
    return written(tmp_path_factory.mktemp("clip"), "clip")


@pytest.fixture(scope="module")
def text(clip):
    return load_text_tower(None, clip, 16, "float32")


def texts_of(text, ids, mask):
    arrays = text.text_projection, text.image_projection, text.scale, ids, mask, np.zeros((len(ids), 8))
    return with_features(text.config, ClassTexts(text.tower, *map(jnp.asarray, arrays)))


# ---- parity ------------------------------------------------------------------------------------------------


def test_logits_of_images_and_texts_are_those_of_transformers(clip, text):
    texts = texts_of(text, TEXT["ids"], TEXT["mask"])
    backbone = load_backbone(None, clip, None)
    feature = apply_vit(backbone.config, backbone.params, jnp.asarray(EXPECTED["clip/image"])).cls
    logits = texts.scale * image_features(texts, feature) @ texts.rows.T
    np.testing.assert_allclose(logits, EXPECTED["clip/logits"], atol=1e-5)


def test_names_of_openai_are_the_same_projections(clip, text, tmp_path):
    tensors = tensors_of("clip")
    tensors["text_projection"] = np.ascontiguousarray(tensors.pop("text_projection.weight").T)
    tensors["visual.proj"] = np.ascontiguousarray(tensors.pop("visual_projection.weight").T)
    other = load_text_tower(None, written(tmp_path / "openai", "clip", tensors), 16, "float32")
    for name in ("text_projection", "image_projection", "scale"):
        np.testing.assert_array_equal(getattr(other, name), getattr(text, name))


def test_context_vectors_stand_where_tokens_stood(text):
    """A text whose second and third tokens are context vectors, of their own embeddings, is the text."""
    ids = TEXT["ids"][:1]
    rest = {"ids": np.delete(ids, [1, 2], 1), "mask": np.ones((1, 8), bool)}
    context = jnp.asarray(text.tower["embed"])[ids[0, 1:3]]
    feature = apply_text(text.config, text.tower, rest, Injection(context=context)).cls
    np.testing.assert_allclose(feature, EXPECTED["clip/end"][:1], atol=1e-5)
    moved = apply_text(text.config, text.tower, rest, Injection(context=context[::-1])).cls
    assert jnp.abs(moved - feature).max() > 1e-3


# ---- prompts -----------------------------------------------------------------------------------------------


def dataset(names, name="own", sources=None):
    image = np.zeros((4, 8, 8, 3), np.uint8)
    label = np.arange(4) % len(names)
    return fcljax.Dataset(name, image, label, image, label, names, sources=sources)


def test_a_prompt_is_the_template_with_the_name(tmp_path):
    assert prompts_of("a {}.", dataset(("sea_horse", "cat"))) == ["a sea horse.", "a cat."]
    assert prompts_of("{}", dataset(("digits/0", "glyphs/a"), sources=(0, 1))) == ["0", "a"]
    assert prompts_of("the {}", load_split(config.preset("linear"), 32))[:2] == ["the 0", "the 1"]
    file = tmp_path / "prompts.txt"
    file.write_text("n02\ta tench\n\nn01\ta hen {}\n")
    assert prompts_of(f"file:{file}", dataset(("n01", "n02"))) == ["a hen {}", "a tench"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("n01 a hen", "line 1: expected CLASS, tab, PROMPT"),
        ("n03\ta hen", "line 1: no class is called 'n03'; did you mean 'n02'?"),
        ("n01\ta hen\nn01\ta hen", "line 2: the class 'n01' appears twice"),
        ("n01\ta hen", "has no line for the class 'n02', and 1 lack one"),
    ],
)
def test_a_file_of_prompts_has_each_class_once(line, says, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text(line)
    with pytest.raises(InputError) as error:
        prompts_of(f"file:{file}", dataset(("n01", "n02")))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_classes_without_names_are_refused():
    for ids in (("0", "1"), ("n01440764", "n01443537")):
        with pytest.raises(
            InputError, match=f"have ids .{ids[0]}, {ids[1]}. and no names; nearest: file:PATH"
        ):
            prompts_of("{}", dataset(ids))
    with pytest.raises(InputError, match="have ids .n01440764. and no names"):
        prompts_of("{}", dataset(("n01440764",)))


def refused(capsys, *words):
    assert cli.main(["run", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_what_cannot_be_a_classifier_of_names_is_one_line(clip, tmp_path, capsys):
    for template in ("a photo", "a {} of {}"):
        assert "nearest: 'a photo of a {}'" in refused(capsys, "zero-shot", "--class-prompts", template)
    assert "'resnet_micro' has no text tower" in refused(capsys, "zero-shot", "--backbone", "resnet_micro")
    vit = "tests/golden/timm.safetensors"
    assert "'timm.safetensors' has no text tower, as CLIP has; nearest: hf:openai/clip" in refused(
        capsys, "zero-shot", "--checkpoint", vit, "--heads", "2"
    )
    assert "no tokenizer.json beside the weights" in refused(capsys, "zero-shot", "--checkpoint", clip)
    assert "reads pixels, and wine has arrays" in refused(capsys, "zero-shot", "--dataset", "wine")
    tensors = tensors_of("clip")
    tensors["text_projection.weight"] = tensors["text_projection.weight"][:, :8]
    broken = written(tmp_path / "broken", "clip", tensors)
    assert "has projections (8, 8) of texts and (16, 8) of images" in refused(
        capsys, "zero-shot", "--checkpoint", broken
    )


def test_a_prompt_that_is_too_long_and_a_tokenizer_of_another_vocabulary_are_refused(
    text, monkeypatch, tmp_path
):
    (tmp_path / "tokenizer.json").write_text("{}")
    text = text._replace(tokenizer=tmp_path)

    def tokens(prompts, folder, length):
        assert (folder, length) == (tmp_path, 15)
        return padded([[3, *([5] * len(prompt)), 29] for prompt in prompts])

    monkeypatch.setattr("fcljax.data.files.tokenizer_files.tokenize", tokens)
    assert class_texts(text, ["12", "123"], contexts=9).ids.shape == (2, 5)
    with pytest.raises(
        InputError, match="'1234' has 6 tokens, and the text tower reads 14 beside 9 context vectors"
    ):
        class_texts(text, ["1234"], contexts=9)
    monkeypatch.setattr("fcljax.data.files.tokenizer_files.tokenize", lambda *_: padded([[3, 30, 29]]))
    with pytest.raises(InputError, match="the tokenizer has id 30, and the text tower 30 ids"):
        class_texts(text, ["a"])


def test_letters_of_the_packaged_tower_are_their_unicode_names():
    config = TEXT_TOWERS["vit_micro"]
    letter, name, other = packaged_tokens(config, ["a Գ", "a ARMENIAN CAPITAL letter gim", "a Դ"])
    assert letter == name and letter != other
    assert letter[0] == config.vocabulary - 2 and letter[-1] == max(letter) == config.vocabulary - 1


# ---- runs --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_zero_shot_classifier_knows_classes_of_later_tasks():
    """Of digits, which the packaged text tower has seen in print; the order of classes changes nothing."""
    found = fcljax.run("zero-shot", "digits", tasks=2, progress=False, class_order="natural")
    summary = found.metrics
    base, new, harmonic = (summary["base_and_new"][name] for name in ("base", "new", "harmonic"))
    assert base == [summary["A"][0]] and len(new) == 1
    assert harmonic == [pytest.approx(2 * base[0] * new[0] / (base[0] + new[0]))]
    # five classes by chance: 20 %
    assert min(base[0], new[0]) > 0.5
    assert summary["trainable_params"] == 0 and summary["communication_total"]["upload_bytes"] == 0
    turned = fcljax.run("zero-shot", "digits", tasks=2, progress=False, class_order="5,6,7,8,9,0,1,2,3,4")
    assert turned.metrics["base_and_new"]["new"] == base and turned.metrics["base_and_new"]["base"] == new
