"""Experiments at mini scale: the design of a paper's table, made small enough to end in minutes on two CPU
cores, without downloads. Its numbers are not the paper's; what can be compared is the order of the rows."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from fcljax import config
from fcljax.config import RunConfig

CLASSES = {"cifar100": 100, "tiny_imagenet": 200}  # of the data sets that are dealt by labels of a task
GLYPHS, TASKS = 100, 5  # classes of the data set `glyphs`, and tasks at most
# training images of a class; sampled clients draw a tenth of them
IMAGES, IMAGES_SAMPLED = 20, 100

VALUES: dict[str, Any] = {
    # as the packaged network and the glyphs are meant to be seen
    "backbone": "vit_micro",
    "checkpoint": None,
    "decoder": None,
    "stem": None,
    "heads": None,
    "dtype": "float32",
    "image_size": None,
    "store_size": None,
    "class_list": None,
    "preprocess": "fppl",
    "normalise": "checkpoint",
    "augment": None,
    "glyph_test": 10,
    "eval_batch_size": 64,
    "data_budget": None,
    "lanes": None,
    "lane_mode": None,
    "devices": 1,
    # of 16 patches, of which a quarter shows too little of a letter
    "mask_ratio": 0.5,
    # another data set than the run's
    "surrogate": "digits",
    # the clients' batch size, as where nothing is given
    "server_batch_size": None,
}
MOST: dict[str, int] = {
    "tasks": TASKS,
    "clients": 5,
    "rounds": 3,
    "epochs": 3,
    "batch_size": 16,
    # blocks of the micro network
    "prompt_blocks": 6,
    "pool_blocks": 6,
    "vpt_blocks": 6,
    "coda_blocks": 6,
    "lora_blocks": 6,
    # rows that clients remember, of 20 of a class and not hundreds
    "exemplars": 2,
    "memory_size": 100,
    # training on the server
    "server_epochs": 3,
    "tune_epochs": 2,
    "tune_batch": 16,
    "distill_steps": 100,
    "synthesis_rounds": 10,
    "synthesis_warmup": 4,
    "student_steps": 20,
    "match_steps": 25,
}
# rates, and what they belong to
USUAL = (
    "lr",
    "full_lr",
    "lora_lr",
    "server_lr",
    "tune_lr",
    "distill_lr",
    "generator_lr",
    "optimiser",
    "momentum",
    "weight_decay",
)


# By how much the rates of a method are multiplied in a system's tables. Most are higher than by default: what
# moves in hundreds of steps at the paper's scale has a few dozens here. Chosen on held-out training images,
# never by the order of rows: experiments/mini_rates.py tries, docs/results/history.md has the accuracies.
_PROMPT, _WHOLE, _PAIR = {"lr": 10}, {"lr": 10, "full_lr": 10}, {"lora_lr": 100}
FACTORS: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "hepco": {
        "hepco": _PROMPT | {"generator_lr": 10},
        **dict.fromkeys(("centralized-prompt", "fedavg-prompt", "fed-cprompt"), _PROMPT),
        **dict.fromkeys(("fedavg-ft", "fedlwf-mc", "cfed", "target"), _WHOLE),
    },
    "pilora": {"pilora": _PAIR | {"full_lr": 100}, "joint": _PAIR, "fedclm": _PAIR},
    "pmae": dict.fromkeys(
        ("pmae", "l2p", "l2p-pmae", "dualprompt", "dualprompt-pmae", "coda-prompt", "coda-prompt-pmae"),
        _PROMPT,
    ),
    "vfcl": {"vfcl": {"lr": 5, "full_lr": 0.3}, "glfc": {"lr": 30}, "cfed": {"lr": 100}},
}


def mini(method: str, settings: RunConfig, system: str, kept: Collection[str] = ()) -> RunConfig:
    """The settings of a row at mini scale.

    Args:
      method: of the row.
      settings: resolved, at the paper's scale.
      system: whose table the row is of: hepco, pilora and so on.
      kept: fields that the row itself sets, or that the table varies: they stay as they are, but for rates
        that FACTORS multiplies.

    What becomes of each field:
      dataset: `glyphs`, 100 rendered letters, which the packaged network has never seen; of a pool of sources
        the mixture of digits and glyphs. `surrogate`, where a method has it: digits.
      glyph_train: 20 images of a class, 100 with sampled clients. `glyph_test`: 10.
      backbone: vit_micro with its packaged weights and decoder, also where the paper has a convolutional
        network, which learns next to nothing from random values in so few steps. At its own `image_size` of
        32, with `preprocess` fppl, the weights' own pixels and no random crops or flips, since mirrored
        letters are others. `checkpoint`, `stem`, `heads`, `dtype` and where images lie: as usual.
      tasks, clients: at most 5. rounds, epochs: at most 3; where a task has one round, 9 epochs.
      batch_size: at most 16; of the server (`server_batch_size`) the same.
      partition, alpha, imbalance, population, participation, class_order, train_share and all else of who
        holds what: as they are. But `classes_per_client` keeps its share of the
        task's labels, of which there are 20 here; and a pool of CIFAR-100's superclasses becomes one of
        neighbours in the class order, five of them as before.
      lr and all other rates, with the optimiser that they belong to: as `fcljax run METHOD` has them, since
        those of the paper are for longer schedules and larger networks. Some are multiplied: see FACTORS.
      blocks with prompts or LoRA pairs: as many as before, at most the network's 6. Their lengths stay.
      exemplars, memory_size: at most 2 of a class, and 100 in all.
      mask_ratio: half of the network's 16 patches are seen; a quarter shows too little of a letter.
      Epochs and steps of training on the server: at most those of MOST.
      Everything else, and so every switch and weight: as it is.

    Raises:
      InputError: for what cannot be at this scale.
    """
    small = {name: value for name, value in VALUES.items() if hasattr(settings, name)}
    small |= {
        name: min(getattr(settings, name), most)
        for name, most in MOST.items()
        if getattr(settings, name, None) is not None
    }
    small |= _data(settings) | _schedule(settings)
    changed = {name: value for name, value in small.items() if name not in kept}
    changed |= _rates(method, settings, system, kept)
    return config.resolve(method, dataclasses.replace(settings, **changed))


def _rates(method: str, settings: RunConfig, system: str, kept: Collection[str]) -> dict[str, Any]:
    """Those of the row or the method, some of them many times."""
    usual = config.run_class(method, settings.adapter)()
    names = [name for name in USUAL if hasattr(settings, name)]
    rates = {name: getattr(settings if name in kept else usual, name) for name in names}
    factors = FACTORS.get(system, {}).get(method, {})
    return rates | {name: rates[name] * factor for name, factor in factors.items() if name in rates}


def _data(settings: RunConfig) -> dict[str, Any]:
    """Which images there are, and what depends on their number and classes."""
    small: dict[str, Any] = {"dataset": "glyphs", "glyph_train": IMAGES}
    if settings.partition == "sampled":
        small["glyph_train"] = IMAGES_SAMPLED
    if settings.partition == "quantity":
        labels = CLASSES.get(settings.dataset, GLYPHS) / settings.tasks
        now = GLYPHS / min(settings.tasks, TASKS)
        small["classes_per_client"] = max(1, round(settings.classes_per_client * now / labels))
    if settings.pool == "sources":
        small["dataset"] = "mix:digits+glyphs"
    if settings.pool == "superclasses":
        small["pool"] = "order"
    return small


def _schedule(settings: RunConfig) -> dict[str, Any]:
    if settings.rounds == 1:
        return {"epochs": min(settings.epochs, MOST["rounds"] * MOST["epochs"])}
    return {}
