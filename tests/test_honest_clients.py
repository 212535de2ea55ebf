"""No check of claims leaves out an honest client, whatever it holds: one example, one class, examples that
are all alike, or nothing; and whatever its network does, batch normalisation included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import TINY, method_of, play
from test_conformance import OPTIONS, RATE
from toys import make_partition

import fcljax
from fcljax.checks import federation as tiny
from fcljax.checks.examples import images
from fcljax.methods import find_method

pytestmark = pytest.mark.long
LABEL = np.arange(60) % tiny.SIZES.classes


def clients(task, share):
    """What each of four clients holds of a task, at most 9: share(the task's examples)."""
    return make_partition(share(np.flatnonzero(task.current[LABEL])), LABEL, tiny.SIZES.classes)


def one_class_each(examples):
    classes = np.unique(LABEL[examples])
    groups = [examples[LABEL[examples] == label][:9] for label in classes]
    return [*groups, *[examples[:0]] * (4 - len(groups))]


SHARES = {
    "usual": lambda examples: np.split(examples[:20], [9, 9, 13]),
    "one example each": lambda examples: np.split(examples[:4], [1, 2, 3]),
    "one example beside many": lambda examples: np.split(examples[:11], [1, 1, 2]),
    "one class each": one_class_each,
}
# images that are all alike reach the bounds that others stay below
IMAGES = {
    "drawn": lambda image: image,
    "equal": lambda image: jnp.broadcast_to(image[0], image.shape),
    "black": jnp.zeros_like,
    "bright": lambda image: 100 * image,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_honest_client_is_never_left_out(name):
    settings = {"epochs": 1, "batch_size": 4, "lr": RATE} | OPTIONS[name]
    made = tiny.tiny_federation(method_of(name, **settings), images(TINY))
    held = {how: [clients(task, share) for task in tiny.TASKS] for how, share in SHARES.items()}
    everyone = [partition for partitions in held.values() for partition in partitions]
    engine = tiny.engine_of(made.method, tiny.LANES, made.frozen, made.data, everyone)
    left_out = []
    for how, partitions in held.items():
        for pictures, image in IMAGES.items():
            if pictures != "drawn" and how == "usual":
                continue

            def heard(when, report, described=(how, pictures)):
                if report.rejected or report.impossible:
                    left_out.append((*described, when, report.rejected, report.impossible))

            data = made.data._replace(input=image(made.data.input))
            server = jax.tree.map(jnp.copy, made.server)
            play(engine, server, made.states, partitions, None, data, made.frozen, heard=heard)
    assert not left_out


@pytest.mark.parametrize("network", ["resnet_micro", "vit_micro"])
@pytest.mark.parametrize(
    "name", ["afcl", "fedranpac", "stsa", "fedran", "fedslca", "ccvr", "fedclm", "fedproto", "fedrecon"]
)
def test_no_network_makes_an_honest_client_impossible(name, network):
    """Of the first client the run knows one example, and of the second one class."""
    draw = np.random.default_rng(0)
    image = draw.integers(0, 256, (60, 16, 16, 3), np.uint8)
    label = np.arange(60) % 4
    owner = np.where(label == 1, 1, 2 + np.arange(60) // 4 % 2)
    owner[0] = 0
    random_features = dict.fromkeys(("fedranpac", "stsa"), dict(projection=40))
    options = (random_features | {"fedran": dict(projection=40, rank=12)}).get(name, {})
    # LoRA works inside attention, which a ResNet does not have
    if network == "resnet_micro" and find_method(name).adapter == "lora":
        options = {"adapter": "full"}
    run = fcljax.run(
        name,
        (image, label, image[:20], label[:20]),
        backbone=network,
        partition=owner,
        tasks=2,
        rounds=2,
        epochs=1,
        batch_size=8,
        image_size=16,
        progress=False,
        **options,
    )
    assert run.metrics["rejected_uploads"] == 0
