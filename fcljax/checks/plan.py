"""Estimates for a chip that is not present: memory, time of a round, and the settings
that would run.

The programs of a round are compiled for the chip (`checks/chips.py`). Weights are shapes,
and so are images where there are none. Nothing runs.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import UInt8

from fcljax import config
from fcljax.checks.chips import CHIPS, Chip, Footprint, machine, reports
from fcljax.data.files.dataset import Dataset
from fcljax.data.files.names import has_arrays
from fcljax.data.store import Split
from fcljax.errors import InputError, choose, gib
from fcljax.mesh import abstract_mesh
from fcljax.methods import find_method
from fcljax.models.mae import DecoderConfig, decoder_shapes
from fcljax.models.networks import ConvNetConfig, make_network
from fcljax.models.shapes import CONVNETS, VITS, ViTConfig, array_type
from fcljax.models.weights.pretrained import Pretrained, PretrainedDecoder
from fcljax.options import SurrogateOptions
from fcljax.runs.build import Experiment, assemble, check_reads, sizes_of
from fcljax.runs.evaluate import evaluated_images
from fcljax.runs.fit import USABLE, Need, fit_memory
from fcljax.runs.inputs import (
    RESIDENT_SHARE,
    Inputs,
    compute_type,
    input_pipeline,
    load_inputs,
    load_network,
    load_split,
    network_trains,
    texts_of,
    with_text_side,
)
from fcljax.runs.machine import Machine
from fcljax.runs.programs import EngineState, engine_state
from fcljax.scenario import fit_partition as fitted_to_data
from fcljax.scenario import make_scenario

# by which `reports` selects programs: those that train and those that evaluate
LOOPS = " phase "
EVALUATIONS = "evaluation"


class Stand(NamedTuple):
    """Numbers that stand for a data set that is not present."""

    images: int
    """Training images; there is a fifth as many test images."""
    classes: int
    """Number of classes, each with as many images."""
    side: int
    """Pixels of a stored image's side."""


class ChipPlan(NamedTuple):
    """Estimates for a run on a chip."""

    settings: config.RunConfig
    """Settings that would run on the chip."""
    chip: Chip
    """Its memory and peak rates."""
    lanes: int
    """Clients that train at the same time, on all chips together."""
    training: list[Footprint]
    """One for each loop over training steps of a round."""
    evaluation: list[Footprint]
    """One for each evaluated model, on all test images."""
    evaluations: float
    """The run's evaluations, in passes over all test images."""
    beside: int
    """Bytes of test images, which stay in memory beside every program."""
    line: str | None
    """Settings that were changed to fit, for the user; None if nothing had to be."""

    @property
    def memory(self) -> int:
        """Return the bytes that are needed at the same time."""
        programs = (*self.training, *self.evaluation)
        return self.beside + max(program.memory for program in programs)

    @property
    def round_seconds(self) -> float:
        """Return the expected time of a round."""
        return sum(program.round_seconds(self.chip) for program in self.training)

    @property
    def run_seconds(self) -> float:
        """Return the expected time of all rounds and evaluations, without compilation."""
        evaluation = sum(program.round_seconds(self.chip) for program in self.evaluation)
        rounds = self.settings.rounds * self.settings.tasks
        return self.round_seconds * rounds + evaluation * self.evaluations


def plan(settings: config.RunConfig, name: str, stand: Stand | None = None) -> ChipPlan:
    """Estimate what a run with these settings needs on the chips `name`.

    Args:
      settings: resolved.
      name: one of `CHIPS`.
      stand: stands for the images; None loads those that the settings name.

    Raises:
      InputError: for an unknown chip or a missing compiler, for what `load_inputs`
        refuses, or if the run does not fit: the line gives the bytes needed, the bytes
        present and the nearest settings.
    """
    target, placement = machine(name)
    chip = CHIPS[name]
    exp = experiment(settings, target, chip, stand)
    # `fit_memory` asks for the need of several settings and returns one of them, whose
    # programs must not be compiled again
    compiled: dict[config.RunConfig, list[Footprint]] = {}

    def need(exp: Experiment) -> Need:
        compiled[exp.settings] = list(reports(exp, placement, chip.kind, LOOPS))
        largest = max(compiled[exp.settings], key=lambda program: program.memory)
        return Need(largest.program, largest.memory + _beside(exp), largest.temporary)

    def with_settings(settings: config.RunConfig) -> Experiment:
        return assemble(settings, exp.inputs, exp.scenario, exp.sizes, machine=target)

    # training first: it decides the lanes. An evaluation depends on a setting of its own,
    # which `fit_memory` does not change.
    exp, line = fit_memory(exp, chip.memory, with_settings, need)
    evaluation = list(reports(exp, placement, chip.kind, EVALUATIONS))
    _check_evaluation(exp, evaluation, chip)
    evaluations = evaluated_images(exp) / len(exp.scenario.test_label)
    training = compiled[exp.settings]
    lanes = exp.engine.lanes.count
    return ChipPlan(exp.settings, chip, lanes, training, evaluation, evaluations, _beside(exp), line)


def _check_evaluation(exp: Experiment, evaluation: list[Footprint], chip: Chip) -> None:
    """Refuse a batch size with which an evaluation does not fit."""
    need = _beside(exp) + max(program.memory for program in evaluation)
    size = exp.settings.eval_batch_size
    if need > USABLE * chip.memory:
        raise InputError(
            f"eval_batch_size: with {size} images an evaluation needs {gib(need)} and the device has "
            f"{gib(chip.memory)}; nearest: --eval-batch-size {max(1, size // 2)}"
        )


def many_chips(
    settings: config.RunConfig, name: str, chips: int, stand: Stand | None = None
) -> tuple[Experiment, EngineState]:
    """Return the experiment on many chips and the shapes of the engine's state on each of them.

    Nothing is compiled, so no compiler for the chip is needed.

    Args:
      settings: resolved.
      name: one of `CHIPS`.
      chips: number of chips that share the clients.
      stand: as of `plan`.

    Raises:
      InputError: for an unknown chip, or for settings that the chips cannot share.
    """
    chip = CHIPS[choose("chip", name, CHIPS)]
    # a small budget leaves the images on the host, so none is copied
    settings = dataclasses.replace(settings, data_budget=1)
    exp = experiment(settings, Machine(chip.kind, abstract_mesh(chips)), chip, stand)
    return exp, engine_state(exp)


def _beside(exp: Experiment) -> int:
    """Return the bytes of test images that stay on the chip."""
    return exp.test.input_bytes if isinstance(exp.test, Split) else 0


def experiment(
    settings: config.RunConfig, target: Machine, chip: Chip, stand: Stand | None = None
) -> Experiment:
    """Return the experiment of these settings on a machine that is not present; arguments
    as of `plan`."""
    settings = dataclasses.replace(settings, dtype=compute_type(settings, target.backend))
    # by the chip's memory: the default asks the device that is present
    if settings.data_budget is None:
        settings = dataclasses.replace(settings, data_budget=int(RESIDENT_SHARE * chip.memory / 2**20))
    if stand is None and has_arrays(settings.dataset, settings.backbone):
        # the networks of tables and text are small, so their weights may be values
        inputs = load_inputs(settings)
        check_reads(settings, inputs.dataset)
    else:
        inputs = _abstract_inputs(settings, stand)
    data = inputs.dataset
    settings = config.resolve(fitted_to_data(settings, data))
    scenario = make_scenario(data, settings, settings.rounds, find_method(settings.source).joint)
    return assemble(settings, inputs, scenario, sizes_of(scenario), machine=target)


def _abstract_inputs(settings: config.RunConfig, stand: Stand | None) -> Inputs:
    """Return the inputs of a run on images, with shapes as weights."""
    backbone = with_text_side(settings, abstract_backbone(settings))
    size = backbone.config.image_size
    data = load_split(settings, size) if stand is None else blank_images(stand)
    views = input_pipeline(settings.preprocess, size, fills_frame=not data.augment)
    texts = texts_of(settings, backbone, data)
    return Inputs(backbone, data, views, data.augment, _blank_surrogate(settings, size), texts=texts)


def blank_images(stand: Stand) -> Dataset:
    """Return a data set of black images, with its classes in turn."""
    # at least one test image of each class: a task without any has no accuracy
    test = max(stand.classes, stand.images // 5)
    train_image = _blank(stand.images, stand.side)
    test_image = _blank(test, stand.side)
    names = tuple(f"class {number}" for number in range(stand.classes))
    train_label = np.arange(stand.images) % stand.classes
    test_label = np.arange(test) % stand.classes
    return Dataset("blank", train_image, train_label, test_image, test_label, names)


def _blank(count: int, side: int) -> UInt8[np.ndarray, "count side side 3"]:
    """Return black images that share the memory of one pixel."""
    return np.broadcast_to(np.uint8(0), (count, side, side, 3))


def _blank_surrogate(settings: config.RunConfig, size: int) -> np.ndarray | tuple:
    """Return black images in place of another data set's, where the settings ask for some."""
    if not isinstance(settings, SurrogateOptions):
        return ()
    return _blank(settings.surrogate_images, size)


def abstract_backbone(settings: config.RunConfig) -> Pretrained:
    """Return the network of the settings with shapes as weights.

    A network without a name is read from its file.
    """
    if settings.backbone == "auto":
        return load_network(settings, settings.image_size, settings.seed)
    shape: ViTConfig | ConvNetConfig = {**VITS, **CONVNETS}[settings.backbone]
    size = settings.image_size or shape.image_size
    # `experiment` has replaced `auto` by the chip's type
    dtype = compute_type(settings)
    shape = dataclasses.replace(shape, image_size=size, dtype=dtype)
    half = (0.5, 0.5, 0.5)
    decoder = None
    # shapes alone: weights of a large network need not fit into this machine
    params = jax.eval_shape(make_network(shape, half, half).init, jax.random.key(0))
    kernel_type = "float32" if network_trains(settings) else array_type(dtype)

    def stored(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # only kernels are kept in the compute type, and in float32 if they train
        is_kernel = getattr(path[-1], "key", "") == "kernel"
        return jax.ShapeDtypeStruct(x.shape, kernel_type if is_kernel else x.dtype)

    if settings.method == "pmae":
        decoder_config = DecoderConfig(image_size=size, dtype=dtype)
        parameters = jax.tree_util.tree_map_with_path(stored, decoder_shapes(decoder_config))
        decoder = PretrainedDecoder(decoder_config, parameters, half, half)
    params = jax.tree_util.tree_map_with_path(stored, params)
    return Pretrained(shape, params, None, decoder, half, half, "random", "0", ())
