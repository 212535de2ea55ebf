"""Compiles every program of a round of the five papers' methods for accelerators that are not here.

    python experiments/accelerators.py                 # all cases, into docs/results/accelerators.jsonl
    python experiments/accelerators.py --methods fppl --chips v5e --only phase --set lanes=8 lane_mode=vmap

Each case has a process of its own: a compiler for a ViT-B takes minutes of CPU time and gigabytes of memory.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from fcljax import config
from fcljax.checks import chips
from fcljax.data.files.dataset import Dataset
from fcljax.errors import InputError
from fcljax.methods import find_method
from fcljax.models.mae import DecoderConfig, decoder_shapes
from fcljax.models.networks import NetworkConfig, make_network
from fcljax.models.shapes import CONVNETS, VITS
from fcljax.models.weights.pretrained import Pretrained, PretrainedDecoder
from fcljax.runs.build import Experiment, Machine, assemble, sizes_of
from fcljax.runs.inputs import Inputs, preset
from fcljax.scenario import make_scenario

METHODS = ("fppl", "pilora", "hepco", "pmae", "vfcl")
TABLE_CHIPS = ("v5e", "v5e-16", "h100", "h200")
EXAMPLES, CLASSES, SIDE = 50_000, 100, 32  # as CIFAR-100


def settings_of(method: str, more: dict[str, Any]) -> config.RunConfig:
    """The paper's settings (experiments/METHOD.yaml), on images as CIFAR-100's."""
    base = yaml.safe_load((Path(__file__).parent / f"{method}.yaml").read_text())["base"]
    values = base | {"dataset": "digits", "checkpoint": None, "dtype": "bfloat16", "tasks": 10} | more
    given = {key: value for key, value in values.items() if value is not None}
    return config.resolve(config.from_mapping(method, given, "accelerators"))


def blank_images() -> Dataset:
    """Images and labels of which only the numbers matter."""
    label, test = np.arange(EXAMPLES) % CLASSES, np.arange(10 * CLASSES) % CLASSES
    names = tuple(map(str, range(CLASSES)))

    def image(n: int) -> np.ndarray:
        return np.zeros((n, SIDE, SIDE, 3), np.uint8)

    return Dataset("blank", image(EXAMPLES), label, image(len(test)), test, names)


def abstract_backbone(settings: config.RunConfig) -> Pretrained:
    """The network that the settings name, its weights as shapes."""
    shape: NetworkConfig = {**VITS, **CONVNETS}[settings.backbone]
    size = settings.image_size or shape.image_size
    shape = dataclasses.replace(shape, image_size=size, dtype=settings.dtype)
    half, decoder = (0.5, 0.5, 0.5), None
    params = jax.eval_shape(make_network(shape, half, half).init, jax.random.key(0))

    def stored(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        kernel = getattr(path[-1], "key", "") == "kernel"
        return jax.ShapeDtypeStruct(x.shape, settings.dtype if kernel else x.dtype)

    if settings.method == "pmae":
        of = DecoderConfig(image_size=size, dtype=settings.dtype)
        parameters = jax.tree_util.tree_map_with_path(stored, decoder_shapes(of))
        decoder = PretrainedDecoder(of, parameters, half, half)
    params = jax.tree_util.tree_map_with_path(stored, params)
    return Pretrained(shape, params, None, decoder, half, half, "random", "0", ())


def experiment(settings: config.RunConfig, machine: Machine) -> Experiment:
    """The experiment of these settings, compiled for the machine."""
    backbone, data = abstract_backbone(settings), blank_images()
    inputs = Inputs(backbone, data, preset(settings.preprocess, backbone.config.image_size), True)
    scenario = make_scenario(data, settings, settings.rounds, find_method(settings.method).joint)
    return assemble(settings, inputs, scenario, sizes_of(scenario), machine=machine)


def play(method: str, chip: str, only: str, more: dict[str, Any]) -> None:
    """One case: a line of JSON for each program."""
    machine, placement = chips.machine(chip)
    exp = experiment(settings_of(method, more), machine)
    case = {"method": method, "chip": chip, "set": more, "lanes": exp.engine.lanes.count}
    for each in chips.reports(exp, placement, only):
        share, seconds = each.share(chips.CHIPS[chip]), each.least_seconds(chips.CHIPS[chip])
        found = {"of_memory": each.memory / chips.CHIPS[chip].memory, "share": share, "least_s": seconds}
        print(json.dumps(case | each._asdict() | found), flush=True)


def main() -> None:
    """All cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--chips", nargs="*", default=TABLE_CHIPS)
    parser.add_argument("--only", default="", help="regular expression of programs")
    parser.add_argument("--set", nargs="*", default=[], help="other settings, NAME=VALUE")
    parser.add_argument("--out", default="docs/results/accelerators.jsonl")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    more = {key: yaml.safe_load(value) for key, value in (each.split("=", 1) for each in options.set)}
    if options.case:
        return play(*options.case, options.only, more)
    with open(options.out, "a") as out:
        for method in options.methods:
            for chip in options.chips:
                again = [sys.executable, __file__, "--case", method, chip, "--only", options.only]
                began = time.time()
                done = subprocess.run([*again, "--set", *options.set], stdout=subprocess.PIPE, text=True)
                out.write(done.stdout)
                out.flush()
                said = "" if done.returncode == 0 else f", exit code {done.returncode}"
                print(f"{method} {chip}: {time.time() - began:.0f} s{said}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"accelerators: {error}")
