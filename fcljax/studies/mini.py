"""Scale experiments down: a paper's table made small enough to run in minutes on two
CPU cores, without downloads. The numbers are not the paper's; the order of the rows can
be compared."""

from collections.abc import Collection
from typing import Any

from fcljax import config
from fcljax.choices import chosen, flat
from fcljax.config import RunConfig
from fcljax.methods import find_method

# classes of the data sets with the partition `quantity`
CLASSES = {"cifar100": 100, "tiny_imagenet": 200}
# Classes of the data set `glyphs`, and the largest number of tasks
GLYPHS = 100
TASKS = 5
# training images per class; sampled clients draw a tenth of them
IMAGES = 20
IMAGES_SAMPLED = 100

VALUES: dict[str, Any] = {
    # what the packaged network expects of glyphs
    "backbone": "vit_micro",
    "checkpoint": None,
    "decoder": None,
    "stem": "auto",
    "heads": None,
    "dtype": "auto",
    "image_size": None,
    "store_size": None,
    "class_list": "none",
    "preprocess": "fppl",
    "normalise": "checkpoint",
    "augment": None,
    "glyph_test": 10,
    "eval_batch_size": 64,
    "data_budget": None,
    "lanes": 0,
    "lane_mode": "auto",
    "devices": 1,
    # of 16 patches; a quarter shows too little of a letter
    "mask_ratio": 0.5,
    # not the run's own data set
    "surrogate": "digits",
    # the default: the clients' batch size
    "server_batch_size": None,
}
MOST: dict[str, int] = {
    "tasks": TASKS,
    "clients": 5,
    "rounds": 3,
    "epochs": 3,
    "batch_size": 16,
    # the micro network has six blocks
    "prompt_blocks": 6,
    "pool_blocks": 6,
    "vpt_blocks": 6,
    "coda_blocks": 6,
    "lora_blocks": 6,
    # examples in replay buffers, of 20 per class and not hundreds
    "exemplars": 2,
    "memory_size": 100,
    # training on the server
    "tune_epochs": 2,
    "tune_batch": 16,
    "distill_steps": 100,
    "synthesis_rounds": 10,
    "synthesis_warmup": 4,
    "student_steps": 20,
    "match_steps": 25,
}
RATES = ("lr", "full_lr", "lora_lr", "server_lr", "tune_lr", "distill_lr", "generator_lr")


def mini(settings: RunConfig, unchanged: Collection[str] = ()) -> RunConfig:
    """Return the settings of a row at mini scale.

    Args:
      settings: of a row, at the paper's scale.
      unchanged: fields that the row itself sets or that the table varies. They stay as
        they are, except for learning rates: these are multiplied as the method's own is.

    How each field changes:
      dataset: `glyphs`, 100 rendered letters, which the packaged network has never seen;
        for a pool of sources the mixture of digits and glyphs. `surrogate`, if the method
        has it: digits.
      glyph_train: 20 images per class, 100 with sampled clients. `glyph_test`: 10.
      backbone: vit_micro with its packaged weights and decoder, also in place of a
        convolutional network, which learns next to nothing from random weights in so few
        steps. At its own `image_size` of 32, with `preprocess` fppl, the weights' own
        pixels and no random crops or flips, since mirrored letters are other letters.
        `checkpoint`, `stem`, `heads`, `dtype` and where images are stored: the defaults.
      tasks, clients: at most 5. rounds, epochs: at most 3; 9 epochs if a task has one round.
      batch_size: at most 16; the server's (`server_batch_size`) is the same.
      partition, alpha, imbalance, population, participation, class_order, train_share and all else of the
        client partitions: unchanged. But `classes_per_client` keeps its share of the task's labels, of which
        there are 20 here, and a pool of CIFAR-100's superclasses becomes one of neighbours in the class
        order, still five of them.
      lr and all other learning rates, with their optimiser, and what else `mini` of its presets has: the
        method's defaults at the scale mini, since the paper's are for longer schedules and larger networks.
      blocks with prompts or LoRA pairs: the same number, at most the network's 6. Their
        lengths stay.
      exemplars, memory_size: at most 2 per class, and 100 in all.
      mask_ratio: half of the network's 16 patches are visible; a quarter shows too little
        of a letter.
      Epochs and steps of training on the server: at most those of MOST.
      Everything else, including every switch and weight: unchanged.

    Raises:
      InputError: if the row cannot run at this scale.
    """
    small = {name: value for name, value in VALUES.items() if hasattr(settings, name)}
    small |= {
        name: min(getattr(settings, name), largest)
        for name, largest in MOST.items()
        if getattr(settings, name, None) is not None
    }
    small |= _data(settings) | _schedule(settings)
    changed = {name: value for name, value in small.items() if name not in unchanged}
    changed |= _method_values(settings, unchanged)
    return config.resolve(config.with_values(settings, scale="mini", **changed))


def _method_values(settings: RunConfig, unchanged: Collection[str]) -> dict[str, Any]:
    """Return the method's values at the scale mini; a learning rate in `unchanged`
    changes in proportion."""
    paper = config.preset(settings.method, settings.adapter, scale="paper")
    small = config.preset(settings.method, settings.adapter, scale="mini")
    values = {}
    if "optimiser" not in unchanged:
        options = flat({"optimiser": chosen("optimiser", small)})
        values |= {name: value for name, value in options.items() if name not in unchanged}
    of_mini = find_method(settings.method).presets["intended"].mini
    for name in (*RATES, *of_mini):
        if hasattr(settings, name) and name not in unchanged:
            values[name] = getattr(small, name)
    for name in of_mini:
        if name in unchanged and name in RATES and getattr(paper, name, None):
            # a row that has ten times the method's rate in the paper has ten times its
            # mini rate here
            values[name] = getattr(settings, name) * getattr(small, name) / getattr(paper, name)
    return values


def _data(settings: RunConfig) -> dict[str, Any]:
    """Return the images, and the fields that depend on their number and classes."""
    small: dict[str, Any] = {"dataset": "glyphs", "glyph_train": IMAGES}
    if settings.partition == "sampled":
        small["glyph_train"] = IMAGES_SAMPLED
    if settings.partition == "quantity":
        labels = CLASSES.get(settings.dataset, GLYPHS) / settings.tasks
        now = GLYPHS / min(settings.tasks, TASKS)
        small["classes_per_client"] = max(1, round(vars(settings)["classes_per_client"] * now / labels))
    pool = getattr(settings, "task_pool", "same")
    if pool == "sources":
        small["dataset"] = "mix:digits+glyphs"
    if pool == "superclasses":
        small["task_pool"] = "order"
    return small


def _schedule(settings: RunConfig) -> dict[str, Any]:
    if settings.rounds == 1:
        return {"epochs": min(settings.epochs, MOST["rounds"] * MOST["epochs"])}
    return {}
