"""What a run would need of a chip that is not here, before a machine is booked: does it fit, how long does a
round take at best, and which settings would be chosen.

The programs of a round are compiled for the chip (`checks/chips.py`), with the weights as shapes and, where
they are not here, the images as shapes too. Nothing runs.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import UInt8

from fcljax import config
from fcljax.checks.chips import CHIPS, Chip, Footprint, machine, reports
from fcljax.data.files.dataset import Dataset
from fcljax.data.store import Split
from fcljax.errors import InputError, choose, gib
from fcljax.mesh import abstract_mesh
from fcljax.methods import find_method
from fcljax.models.mae import DecoderConfig, decoder_shapes
from fcljax.models.networks import NetworkConfig, make_network
from fcljax.models.shapes import CONVNETS, VITS
from fcljax.models.weights.pretrained import Pretrained, PretrainedDecoder
from fcljax.options import SurrogateOptions
from fcljax.runs.build import Experiment, Machine, assemble, sizes_of
from fcljax.runs.evaluate import evaluated_images
from fcljax.runs.fit import USABLE, Need, fit_memory
from fcljax.runs.inputs import RESIDENT_SHARE, Inputs, compute_type, input_pipeline, load_network, load_split
from fcljax.runs.programs import EngineState, engine_state
from fcljax.scenario import fit_partition as fitted_to_data
from fcljax.scenario import make_scenario

# In the names of programs that train, and that evaluate
LOOPS = " phase "
EVALUATIONS = "evaluation"


class Stand(NamedTuple):
    """What stands for images that are not here: of them, only the numbers matter."""

    images: int
    """Training images; there is a fifth as many test images."""
    classes: int
    """In equal shares."""
    side: int
    """Pixels of a side, as they are stored."""


class ChipPlan(NamedTuple):
    """The answer."""

    settings: config.RunConfig
    """With what would be chosen for the chip."""
    chip: Chip
    """The chip."""
    lanes: int
    """Clients that train at the same time, on all chips together."""
    training: list[Footprint]
    """Of each loop of a round over training steps."""
    evaluation: list[Footprint]
    """Of each model that is evaluated, on all test images."""
    evaluations: float
    """Of all test images that those of the run are worth."""
    beside: int
    """Bytes of test images, which lie beside every program."""
    line: str | None
    """What was chosen to make it fit; None: it fits as it is."""

    @property
    def memory(self) -> int:
        """Bytes that are needed at the same time."""
        return self.beside + max(each.memory for each in (*self.training, *self.evaluation))

    @property
    def round_seconds(self) -> float:
        """A round takes at least as long."""
        return sum(each.least_seconds(self.chip) for each in self.training)

    @property
    def run_seconds(self) -> float:
        """All rounds and evaluations of the run take at least as long."""
        evaluation = sum(each.least_seconds(self.chip) for each in self.evaluation)
        rounds = self.settings.rounds * self.settings.tasks
        return self.round_seconds * rounds + evaluation * self.evaluations


def plan(settings: config.RunConfig, name: str, stand: Stand | None = None) -> ChipPlan:
    """What a run with these settings would need of the chips `name`.

    Args:
      settings: resolved.
      name: one of `CHIPS`.
      stand: stands for the images; None loads those that the settings name.

    Raises:
      InputError: for an unknown chip, without the compiler for it, for what `load_inputs` refuses, or if
        nothing that may be changed makes it fit: what is needed, what there is, the nearest settings.
    """
    where, placement = machine(name)
    chip = CHIPS[name]
    exp = experiment(settings, where, chip, stand)
    compiled: dict[config.RunConfig, list[Footprint]] = {}

    def need(exp: Experiment) -> Need:
        compiled[exp.settings] = list(reports(exp, placement, chip.kind, LOOPS))
        largest = max(compiled[exp.settings], key=lambda each: each.memory)
        return Need(largest.program, largest.memory + _beside(exp), largest.temporary)

    def again(other: config.RunConfig) -> Experiment:
        return assemble(other, exp.inputs, exp.scenario, exp.sizes, machine=where)

    exp, line = fit_memory(exp, chip.memory, again, need)
    evaluation = list(reports(exp, placement, chip.kind, EVALUATIONS))
    _check_evaluation(exp, evaluation, chip)
    evaluations = evaluated_images(exp) / len(exp.scenario.test_label)
    training = compiled[exp.settings]
    lanes = exp.engine.lanes.count
    return ChipPlan(exp.settings, chip, lanes, training, evaluation, evaluations, _beside(exp), line)


def _check_evaluation(exp: Experiment, evaluation: list[Footprint], chip: Chip) -> None:
    need = _beside(exp) + max(each.memory for each in evaluation)
    size = exp.settings.eval_batch_size
    if need > USABLE * chip.memory:
        raise InputError(
            f"eval_batch_size: with {size} images an evaluation needs {gib(need)} and the device has "
            f"{gib(chip.memory)}; nearest: --eval-batch-size {max(1, size // 2)}"
        )


def many_chips(
    settings: config.RunConfig, name: str, chips: int, stand: Stand | None = None
) -> tuple[Experiment, EngineState]:
    """What the engine holds on each of so many chips that share the clients, by shapes alone: nothing is
    compiled, and no compiler for the chip is needed.

    Args:
      settings: resolved.
      name: one of `CHIPS`.
      chips: their number.
      stand: as of `plan`.

    Raises:
      InputError: for an unknown chip, or for settings that the chips cannot share.
    """
    chip = CHIPS[choose("chip", name, CHIPS)]
    settings = dataclasses.replace(settings, data_budget=1)  # images on the host: none is copied
    exp = experiment(settings, Machine(chip.kind, abstract_mesh(chips)), chip, stand)
    return exp, engine_state(exp)


def _beside(exp: Experiment) -> int:
    return exp.test.image.nbytes if isinstance(exp.test, Split) else 0


def experiment(
    settings: config.RunConfig, where: Machine, chip: Chip, stand: Stand | None = None
) -> Experiment:
    """The experiment of these settings on a machine that is not here; arguments as of `plan`."""
    settings = dataclasses.replace(settings, dtype=compute_type(settings, where.backend))
    if settings.data_budget is None:
        settings = dataclasses.replace(settings, data_budget=int(RESIDENT_SHARE * chip.memory / 2**20))
    backbone = abstract_backbone(settings)
    size = backbone.config.image_size
    data = load_split(settings, size) if stand is None else blank_images(stand)
    views = input_pipeline(settings.preprocess, size, fills_frame=not data.augment)
    settings = config.resolve(fitted_to_data(settings, data))
    scenario = make_scenario(data, settings, settings.rounds, find_method(settings.source).joint)
    inputs = Inputs(backbone, data, views, data.augment, _blank_surrogate(settings, size))
    return assemble(settings, inputs, scenario, sizes_of(scenario), machine=where)


def blank_images(stand: Stand) -> Dataset:
    """Images and labels of which only the numbers matter."""
    test = max(stand.classes, stand.images // 5)
    train_image, test_image = (_blank(count, stand.side) for count in (stand.images, test))
    names = tuple(map(str, range(stand.classes)))
    labels = (np.arange(count) % stand.classes for count in (stand.images, test))
    train_label, test_label = labels
    return Dataset("blank", train_image, train_label, test_image, test_label, names)


def _blank(count: int, side: int) -> UInt8[np.ndarray, "count side side 3"]:
    """Images that take no memory."""
    return np.broadcast_to(np.uint8(0), (count, side, side, 3))


def _blank_surrogate(settings: config.RunConfig, size: int) -> np.ndarray | tuple:
    """What stands for the images of another data set, where the settings ask for some."""
    if not isinstance(settings, SurrogateOptions):
        return ()
    return _blank(settings.surrogate_images, size)


def abstract_backbone(settings: config.RunConfig) -> Pretrained:
    """The network that the settings name, its weights as shapes. A network without a name is read from its
    file."""
    if settings.backbone == "auto":
        return load_network(settings, settings.image_size, settings.decoder, settings.seed)
    shape: NetworkConfig = {**VITS, **CONVNETS}[settings.backbone]
    size = settings.image_size or shape.image_size
    shape = dataclasses.replace(shape, image_size=size, dtype=settings.dtype)
    half = (0.5, 0.5, 0.5)
    decoder = None
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
