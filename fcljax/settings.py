"""The settings that runs of every method share, as frozen dataclasses.

A field's docstring is its help on the command line and its entry on the API page. Ranges,
and which other option must have which value for a field to be read, stand beside the
field (`options.option`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from fcljax.options import option

Fidelity = Literal["intended", "paper", "released", "improved"]
Scale = Literal["auto", "paper", "mini", "fit"]
Pipeline = Literal["fppl", "pmae", "pilora", "hepco", "hepco_domainnet"]
Pixels = Literal["checkpoint", "release", "half", "unit", "imagenet", "clip", "cifar100"]
Positions = Literal["antialiased", "plain"]
Stem = Literal["imagenet", "cifar"]
StemChoice = Literal["auto", "imagenet", "cifar"]
# a string in files and on the command line, an object from Python
Chosen = str | object
"""A name of a table of `choices.py`, or an object that does the same work."""


def is_owned(partition: Chosen) -> bool:
    """Return whether a file or a column of the user assigns each example to a client."""
    return isinstance(partition, str) and partition.startswith(("file:", "column:"))


# Networks for data that are no images -> their line in `fcljax list`. They have no
# attention, so adapters that need it are replaced by `full` (`config.usual_adapter`).
ARRAY_NETS = {
    "mlp": "tables: two layers of 128 on standardised columns, random values; the default for tables",
    "conv1d": "series: three convolutions over time on standardised channels, random values; the default "
    "for series",
    "identity": "the standardised numbers themselves, for classifiers on features",
}
TEXT_NETS = ("text_micro",)  # networks of text

# Upper bounds of options. Beyond them a run would end by running out of memory, minutes
# later and without naming the option.
MOST_SIDE = 6324  # pixels per side: its square is just below 40 megapixels
MOST_GLYPHS = 10_000  # 3 GB in memory
MOST_ROUNDS = 100_000  # the plan of every round is in memory
MOST_CLIENTS = 1_000_000  # the indices of every client's examples are in memory


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """Which images are read, and how they are stored."""

    dataset: str = "digits"
    """Data set: a name of `fcljax list`, npz:PATH, csv:FILE, texts:PATH, folder:PATH,
    list:FILE, hf:OWNER/NAME, tfds:NAME or mix:NAME+NAME."""
    data_dir: str | None = option(None, unset="$FCLJAX_DATA, else ~/.cache/fcljax")
    """Folder of raw and prepared data sets."""
    class_list: str = option("none", unset="none", only=("dataset", "imagenet100", "imagenet200", "mix:NAME"))
    """File of the classes, one WordNet id per line."""
    skip_corrupt: bool = False
    """List and skip examples without a label, and images that cannot be decoded."""
    store_size: int | None = option(None, most=MOST_SIDE, unset="256/224 of the image size")
    """Pixels per side of stored training images of mixed sizes."""
    image_size: int | None = option(None, most=MOST_SIDE, unset="the backbone's own")
    """Pixels per side of the network's input."""
    preprocess: Pipeline = "fppl"
    """Release whose resizing, cropping and flipping is used."""
    glyph_train: int = option(100, most=MOST_GLYPHS, only=("dataset", "glyphs", "mix:NAME"))
    """Training images per class of the data set glyphs."""
    glyph_test: int = option(20, most=MOST_GLYPHS, only=("dataset", "glyphs", "mix:NAME"))
    """Test images per class of the data set glyphs."""
    seed: int = option(2023, least=0, most=2**32 - 1)
    """Seed of all random draws."""


@dataclasses.dataclass(frozen=True)
class SplitConfig(ImageConfig):
    """Which of the images are trained on."""

    holdout: float = option(0.0, least=0.0, below=1.0)
    """Fraction of each class's training images that replaces the test images."""
    verify: bool = False
    """Verify checksums of prepared images that look unchanged."""


@dataclasses.dataclass(frozen=True)
class BackboneConfig:
    """The network, and the range of pixels that it gets."""

    backbone: str = "auto"
    """Network: a backbone of `fcljax list`, a timm name, a hub name (OWNER/NAME), or
    auto: the checkpoint's network, without a checkpoint vit_micro."""
    checkpoint: str | None = option(None, unset="packaged or random weights")
    """Pretrained weights: a file or folder (safetensors, npz, torch, msgpack), or
    hf:OWNER/NAME; of a text encoder where the data are texts."""
    stem: StemChoice = option("auto", unset="cifar below 64 pixels, else imagenet", needs="backbone")
    """First layers of a convolutional network without a checkpoint: 7 x 7 and pooling
    (imagenet), or 3 x 3 (cifar)."""
    heads: int | None = option(None, unset="width / 64", needs="checkpoint")
    """Attention heads, for a checkpoint that does not state them."""
    normalise: Pixels = "checkpoint"
    """Pixel range: the checkpoint's, the paper's release's, or a named one."""
    positions: Positions = "antialiased"
    """Interpolation of position embeddings; the releases use plain."""
    dtype: Literal["auto", "float32", "tf32", "bfloat16"] = option(
        "auto", unset="bfloat16 on an accelerator (of networks that train, only fedavg-ft's), else float32"
    )
    """Number format of the backbone's products: float32 is exact on every device, tf32
    rounds factors. Trained parameters are float32."""


@dataclasses.dataclass(frozen=True)
class InputConfig(BackboneConfig, SplitConfig):
    """The network with its images, and the devices that compute."""

    eval_batch_size: int = 64
    """Images per evaluation step on each device."""
    devices: int = 1
    """Number of accelerators that share the work."""
    data_budget: int | None = option(None, unset="half of the device's memory")
    """MiB of device memory for images; others stay on the host."""


@dataclasses.dataclass(frozen=True)
class PartitionConfig(SplitConfig):
    """Which client holds which examples in which task."""

    tasks: int = 5
    """Number of tasks T."""
    clients: int = 5
    """Number of clients K."""
    partition: Chosen = "dirichlet"
    """How clients get their examples (described by `fcljax list`)."""
    population: Literal["static", "redrawn", "independent", "online"] = "static"
    """How long clients keep their examples. static: always; redrawn: until all are
    reassigned in the next round; independent: each client draws some in every round, with
    overlaps; online: each example is seen in one round only."""
    new_clients: int = option(0, least=0)
    """Clients that join with each task after the first (GLFC)."""
    move_on: float = option(1.0, least=0.0, most=1.0)
    """Fraction of clients that receive data of a new task (GLFC: 0.9)."""
    stay_behind: Literal["keep", "leave"] = option("keep", needs="move_on")
    """The other existing clients keep the examples of their last task, or leave for good."""
    train_share: float = option(1.0, positive=True, most=1.0)
    """Fraction of each class's training examples to use."""
    class_order: Literal["shuffled", "natural", "python", "file:PATH", "NAME,NAME"] = "shuffled"
    """Order in which tasks take the classes; python shuffles as HePCo's release does. A
    file has one class per line; classes are names, or numbers from 0."""
    classes: str = option("all", unset="all")
    """Classes of the data set that the run uses: names, numbers from 0 and ranges, such
    as 0-9,12. There are no others for it."""
    tasks_by: Chosen = "class"
    """A task is a group of classes, or a domain of a column."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How clients train, and which parameters."""

    adapter: str = ""
    """Adapter, which decides what trains: one of `fcljax list`."""
    participation: float = option(1.0, positive=True)
    """Fraction of clients sampled per round, or their number if 2 or more."""
    rounds: int = option(3, most=MOST_ROUNDS)
    """Communication rounds per task."""
    epochs: int = option(5, most=MOST_ROUNDS)
    """Local epochs per round."""
    batch_size: int = 32
    """Examples per local step."""
    augment: bool | None = option(None, unset="as the data set suggests")
    """Randomly crop and flip training images."""
    lr: float = option(1e-3, positive=True, learning_rate=True)
    """Client learning rate."""
    lr_schedule: Chosen = "constant"
    """Learning-rate schedule of clients over the rounds of a task or the epochs of a
    round."""
    optimiser: Chosen = "adam"
    """Client optimiser; its state is reset in every round."""
    prox_weight: float = 0.0
    """Weight of the FedProx term, the distance to the global model."""
    headtune: bool = False
    """Start a new task's classes at their mean features over all clients (FedNCM's HeadTune)."""
    norm_bound: float = option(0.0, unset="no bound")
    """Maximum L2 distance of client parameters from the global model."""


@dataclasses.dataclass(frozen=True)
class AggregationOptions:
    """How the server merges uploads."""

    aggregator: Chosen = "mean"
    """Aggregation rule; mean weights clients by examples, uniform equally."""
    clip_norm: float = option(0.0, unset="no clipping")
    """L2 norm to which each client's update is clipped."""
    noise_multiplier: float = option(0.0, unset="no noise", needs="clip_norm")
    """Noise standard deviation divided by --clip-norm (central DP)."""
    server_optimiser: Chosen = "none"
    """Server optimiser of the merged client update."""


@dataclasses.dataclass(frozen=True)
class FaultOptions:
    """Which clients misbehave, and how."""

    malicious: int = option(0, least=0)
    """Number of malicious clients, those with the lowest ids."""
    attack: Chosen = option("sign_flip", needs="malicious")
    """What malicious clients do."""
    faults: str = option("none", unset="none")
    """Random faults with their probabilities per client and round, e.g.
    drop=0.1,noise=0.2. Faults: sign_flip, scale, label_flip, nan, weight, counts,
    certain, gram, inf, noise, stale, late, drop."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How clients share the machine, and what is kept of a run."""

    lanes: int = option(0, least=0, unset="chosen for the device")
    """Number of clients that train at a time."""
    lane_mode: Literal["auto", "loop", "vmap", "unroll"] = option("auto", unset="chosen for the device")
    """Compute these clients one by one (loop), batched (vmap), or as copies of the code
    (unroll)."""
    batch_devices: int = option(0, least=0, unset="chosen for the devices, 1 on a CPU")
    """Number of devices that share each client batch."""
    microbatch: int = option(0, least=0, unset="the whole batch; on accelerators as many as fit")
    """Gradient accumulation: split each batch into microbatches of at most N images; the
    update is unchanged up to rounding."""
    remat: bool = False
    """Recompute the blocks of a ViT in the backward pass, to save memory."""
    stop_when_flat: int = option(0, least=0, unset="all rounds")
    """End a task when the accuracy on held-out training images has not improved for N
    rounds."""
    eval_every_round: bool = False
    """Evaluate after every round, not only after every task."""
    checkpoint_every: int | None = option(None, least=1, unset="1; above 64 MiB at most 3 % of the time")
    """Rounds between checkpoints."""
    keep_checkpoints: int = 2
    """Number of checkpoints to keep on disk."""


@dataclasses.dataclass(frozen=True)
class RunConfig(EngineConfig, FaultOptions, AggregationOptions, TrainConfig, PartitionConfig, InputConfig):
    """What every method shares. The defaults run on the handwritten digits with the
    packaged micro ViT and need no download."""

    method: str = ""
    """Method: one of `fcljax list`, or your own as FILE.py, FILE.py:NAME or MODULE:NAME."""
    fidelity: Fidelity = "intended"
    """Reading of the paper. intended: without the release's bugs; paper: its literal
    equations; released: the authors' code; improved: chosen on held-out images."""
    scale: Scale = "auto"
    """Scale of learning rates and server training. paper: the paper's; mini: for small
    networks and images; fit: learning rates are searched on held-out training images, and
    --fidelity is improved if the method has it. auto: mini for a micro network without a
    checkpoint; else fit, if clients take at most 1/3 or at least 3 times the preset's
    steps and no option that fit decides is set; else paper."""
    rate_factor: float = option(0.0, unset="decided or searched when the run begins")
    """Factor on all learning rates of the method, including the server's."""
    dp_delta: float = option(0.0, most=1.0, unset="not reported", needs="noise_multiplier")
    """Delta at which the privacy spent is reported as epsilon; needs --noise-multiplier
    and the optional dependency `privacy`."""
    source: ClassVar[Any] = None
    """What `methods.find_method` finds the method by: its name, or the entry itself
    (`config.run_class`)."""


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """Processes that share a run, on one host or several; each gets the same options and
    its own number."""

    coordinator: str | None = option(None, unset="one process")
    """HOST:PORT of process 0, for a run on the devices of several processes; auto asks
    Slurm, Open MPI, Kubernetes or the TPU runtime."""
    processes: int | None = option(None, unset="the coordinator's", needs="coordinator")
    """Number of processes."""
    process: int | None = option(None, least=0, unset="the coordinator's", needs="coordinator")
    """Index of this process, from 0."""
    host_timeout: int | None = option(None, least=5, most=3600, unset="100", needs="coordinator")
    """Seconds to wait for other processes to start or to show a sign of life."""

    @property
    def seconds(self) -> int:
        """Return `host_timeout`, or its default, in seconds."""
        return 100 if self.host_timeout is None else self.host_timeout


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """A method without options of its own."""


class Preset(NamedTuple):
    """What a method is under one reading of its paper."""

    options: Any
    """The method's own options."""
    run: RunConfig = RunConfig()
    """What all methods share."""
    adapters: tuple = ()
    """Options of adapters, at most one instance of each adapter's dataclass. Adapters
    that are not among them have their own preset."""
    mini: Mapping = {}
    """Option -> value at the scale mini, for micro networks and a few dozen steps:
    learning rates and training of the server. Options of adapters that a run does not
    have are left out."""


# fidelity -> preset; a fidelity that is missing is the intended one
Presets = Mapping[str, Preset]


def with_changes(presets: Presets, adapters: tuple = (), **run: Any) -> Presets:
    """Return presets with other options of adapters, and other values of the run's fields."""
    return {
        name: preset._replace(
            run=dataclasses.replace(preset.run, **run), adapters=adapters or preset.adapters
        )
        for name, preset in presets.items()
    }


def with_headtune(presets: Presets) -> Presets:
    """Return presets with `improved`: the intended one, whose new classes start at their mean
    features (docs/results/fit.md)."""
    intended = presets["intended"]
    run = dataclasses.replace(intended.run, headtune=True)
    # Class means are sums over examples, and `parts.server.check_aggregation` refuses
    # them beside a rule that weighs clients otherwise.
    if run.aggregator == "uniform":
        run = dataclasses.replace(run, aggregator="mean")
    return {**presets, "improved": intended._replace(run=run)}


def with_mini(presets: Presets, **values: Any) -> Presets:
    """Return presets with these values at the scale mini.

    They were chosen on held-out training images of digits, glyphs and, where a comment
    says so, with a real network, never on test images; docs/results/embedded.md has the
    accuracies.
    """
    return {name: preset._replace(mini=values) for name, preset in presets.items()}
