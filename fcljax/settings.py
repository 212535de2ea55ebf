"""The settings that runs of every method share, as frozen dataclasses.

A field's docstring is its help on the command line and its entry on the API page. Ranges, and which other
option must have which value for a field to be read, stand beside the field (`options.option`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from fcljax.options import option

Fidelity = Literal["intended", "paper", "released", "improved"]
Scale = Literal["auto", "paper", "mini", "fit"]
Pipeline = Literal["fppl", "pmae", "pilora", "hepco", "hepco_domainnet"]
Partition = Literal[
    "dirichlet",
    "iid",
    "quantity",
    "shards",
    "task_dirichlet",
    "whole_classes",
    "sampled",
    "private",
    "file:PATH",
    "column:NAME",
]
Pixels = Literal["checkpoint", "release", "half", "unit", "imagenet", "clip", "cifar100"]
Positions = Literal["antialiased", "plain"]
Stem = Literal["imagenet", "cifar"]
StemChoice = Literal["auto", "imagenet", "cifar"]
TaskPool = Literal["same", "order", "superclasses", "sources"]
Aggregator = Literal[
    "mean",
    "uniform",
    "median",
    "trimmed_mean",
    "geometric_median",
    "krum",
    "multi_krum",
    "centred_clipping",
]


def is_owned(partition: str) -> bool:
    """Whether the user says who has which example: by a file or a column."""
    return partition.startswith(("file:", "column:"))


ATTACKS = {
    "sign_flip": "all floating parameters of an upload are negated",
    "scale": "all floating parameters of an upload are multiplied by 1e6",
    "label_flip": "labels are mirrored within the client's task: class a of n becomes class n - 1 - a",
    "nan": "all floating parameters of an upload are NaN",
    "weight": "the client claims a weight of 1e30",
    "counts": "integers and numbers of examples in an upload are the largest that there are, and standard "
    "deviations are 1e-10",
    "certain": "standard deviations in an upload are a tenth of the client's own, and normal noise is added "
    "to each other array, as large as its root mean square",
}

# Upper bounds, where a number beyond them would end a run in another way than with a line that names it.
MOST_SIDE = 6324  # images of 40 megapixels or more are refused
MOST_GLYPHS = 10_000  # 3 GB in memory
MOST_ROUNDS = 100_000  # the plan of every round is in memory
MOST_CLIENTS = 1_000_000  # the indices of every client's examples are in memory


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """Which images are read, and how they are stored."""

    dataset: str = "digits"
    """Data set: a name of `fcljax list`, npz:PATH, folder:PATH, list:FILE, hf:OWNER/NAME, tfds:NAME or
    mix:NAME+NAME."""
    data_dir: str | None = option(None, unset="$FCLJAX_DATA, else ~/.cache/fcljax")
    """Folder of raw and prepared data sets."""
    class_list: str = option("none", unset="none")
    """File with a WordNet id per line, for imagenet100 and imagenet200."""
    skip_corrupt: bool = False
    """Leave out images that cannot be decoded or have no label, and list them."""
    store_size: int | None = option(None, most=MOST_SIDE, unset="256/224 of the image size")
    """Side in pixels at which training images of many sizes are stored."""
    image_size: int | None = option(None, most=MOST_SIDE, unset="the backbone's own")
    """Side in pixels of the images that the network sees."""
    preprocess: Pipeline = "fppl"
    """Release whose resizing, cropping and flipping of images is used."""
    glyph_train: int = option(100, most=MOST_GLYPHS)
    """Training images per class of the data set glyphs."""
    glyph_test: int = option(20, most=MOST_GLYPHS)
    """Test images per class of the data set glyphs."""
    seed: int = option(2023, least=0, most=2**32 - 1)
    """Seed of the class order, the partition, the initial values and all random draws."""


@dataclasses.dataclass(frozen=True)
class SplitConfig(ImageConfig):
    """Which of the images are trained on."""

    holdout: float = option(0.0, least=0.0, below=1.0)
    """Share of each class's training images to evaluate on in place of the test images, for choosing
    settings."""
    verify: bool = False
    """Compare prepared images with their checksums even if their files look untouched."""


@dataclasses.dataclass(frozen=True)
class BackboneConfig:
    """The network, and the range of pixels that it gets."""

    backbone: str = "auto"
    """Network: a backbone of `fcljax list`; auto for the checkpoint's, and vit_micro without one; or weights
    that are here, by timm's name (vit_base_patch16_224.augreg_in21k) or the hub's (facebook/dinov2-base)."""
    checkpoint: str | None = option(None, unset="packaged or random weights")
    """Pretrained weights: a file or folder (safetensors, npz, torch, msgpack), or hf:OWNER/NAME."""
    stem: StemChoice = option("auto", unset="cifar under 64 pixels, else imagenet")
    """First layers of a convolutional network without a checkpoint: 7 x 7 and pooling, or 3 x 3."""
    heads: int | None = option(None, unset="width / 64")
    """Attention heads of a checkpoint that does not state them."""
    normalise: Pixels = "checkpoint"
    """Pixel range: the one the weights expect, the one of the paper's release, or a named one."""
    positions: Positions = "antialiased"
    """Interpolation of position embeddings at another image size; the releases use plain."""
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", unset="bfloat16 for a frozen network on an accelerator, else float32"
    )
    """Number format of what the backbone computes; float32 is exact on every device."""


@dataclasses.dataclass(frozen=True)
class InputConfig(BackboneConfig, SplitConfig):
    """The network with its images, and the devices that compute."""

    decoder: str | None = option(None, unset="the checkpoint's, or the packaged one of vit_micro")
    """Weights of a masked autoencoder's decoder, from `fcljax pretrain-decoder` or a checkpoint."""
    eval_batch_size: int = 64
    """Images per evaluation step of a device."""
    devices: int = 1
    """Number of accelerators that share the clients, evaluations and features."""
    data_budget: int | None = option(None, unset="half of the device's memory")
    """MiB of device memory for images; further images stay in host memory."""


@dataclasses.dataclass(frozen=True)
class PartitionConfig(SplitConfig):
    """Which client holds which examples in which task."""

    tasks: int = 5
    """Number of tasks T."""
    clients: int = 5
    """Number of clients K."""
    partition: Partition = "dirichlet"
    """How examples are assigned to clients: dirichlet and iid once for all tasks; quantity, shards,
    task_dirichlet and whole_classes (GLFC) per task; sampled clients per round (HePCo); private streams of
    tasks (VFCL); a file of example or file name and client, or a column of the data set."""
    classes_per_client: int = 2
    """Classes of a task that a client holds (quantity, whole_classes), or shards of 1/100 of its examples
    (shards)."""
    alpha: float = option(0.5, positive=True)
    """Dirichlet concentration of dirichlet and task_dirichlet; smaller values are less even."""
    min_examples: int = option(10, least=0)
    """Fewest examples of a client, per task with task_dirichlet; partitions with fewer are drawn again."""
    population: Literal["static", "redrawn", "independent", "online"] = "static"
    """Whether clients keep their examples, all examples are assigned anew in every round, each client's are
    drawn independently and may overlap, or each example comes in one round only and is seen once (online)."""
    new_clients: int = option(0, least=0)
    """Clients, of all --clients, that join with each task after the first (GLFC)."""
    move_on: float = option(1.0, least=0.0, most=1.0)
    """Share of the clients so far, drawn anew with each task, that get examples of it (GLFC: 0.9)."""
    stay_behind: Literal["keep", "leave"] = "keep"
    """Whether the others keep the examples of their last task, or leave for good."""
    split_ratio: float = option(0.1, positive=True, most=1.0, only=("partition", "sampled"))
    """Share gamma of a class's examples that a sampled client draws."""
    category_ratio: float | None = option(
        None, positive=True, most=1.0, only=("partition", "sampled", "private"), unset="0.6; private: 0.5"
    )
    """Share kappa of a task's classes that a sampled client or a private stream has."""
    imbalance: float = option(1.0, positive=True, most=1.0, only=("partition", "sampled"))
    """Examples of a sampled client's last class over those of its first class."""
    long_tail: Literal["applied", "reported"] = option("applied", only=("partition", "sampled"))
    """Whether sampled clients have uneven classes, or only report that they have."""
    task_pool: TaskPool = option("same", only=("partition", "private"), unset="the same tasks for all")
    """Tasks that private streams draw from: neighbours in the class order (order), CIFAR-100's superclasses,
    or neighbours within one data set of a mixture (sources)."""
    task_pool_classes: int = option(5, least=1, only=("task_pool", "order", "superclasses", "sources"))
    """Classes of a task in the pool of private streams."""
    task_pool_limit: int = option(0, least=0, only=("task_pool", "sources"), unset="all that fit")
    """Largest number of tasks of one source in the pool of private streams."""
    train_share: float = option(1.0, positive=True, most=1.0)
    """Share of each class's training examples that is used."""
    class_order: Literal["shuffled", "natural", "python", "file:PATH", "NAME,NAME"] = "shuffled"
    """Order in which tasks take the classes; python shuffles as HePCo's release does. A file has a class in
    each line; classes are names or numbers from 0."""
    base_classes: int = option(0, least=0, unset="as the other tasks")
    """Classes of the first task; the others share the rest."""
    classes_per_task: int = option(0, least=0, unset="all classes over --tasks")
    """Classes of each task after the first, which then decide the number of tasks."""
    task_sizes: str = option("", unset="as even as possible")
    """Classes of each task, such as 50,10,10,30."""
    tasks_by: Literal["class", "column:NAME"] = "class"
    """What makes a task: its classes, or the examples of a domain, which a column of the data set names."""
    task_order: str = option("", unset="by name")
    """Order of the domains of --tasks-by, such as real,sketch,clipart."""
    blurry: float = option(0.0, least=0.0, below=1.0)
    """Share of each class's examples that come in other tasks than the class's own, equally many in each."""
    disjoint: float = option(0.0, least=0.0, below=1.0)
    """Share of the classes of which --blurry moves no example."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How clients train, and which parameters."""

    adapter: str = ""
    """Which parameters of the network train: an adapter of `fcljax list`."""
    participation: float = option(1.0, positive=True)
    """Share of the clients that participate in a round; a whole number from 2: so many clients."""
    rounds: int = option(3, most=MOST_ROUNDS)
    """Communication rounds per task."""
    epochs: int = option(5, most=MOST_ROUNDS)
    """Local epochs per round."""
    batch_size: int = 32
    """Examples per local step."""
    augment: bool | None = option(None, unset="as the data set suggests")
    """Random crops and flips of training images."""
    lr: float = option(1e-3, positive=True, learning_rate=True)
    """Learning rate of the clients."""
    optimiser: Literal["adam", "sgd"] = "adam"
    """Optimiser of the clients; its state is new in every round."""
    momentum: float = option(0.0, most=1.0, only=("optimiser", "sgd"))
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Weight decay of the clients: its product with the parameters is added to the gradient."""
    prox_weight: float = 0.0
    """Weight of the FedProx term, which keeps clients near the global model."""
    norm_bound: float = option(0.0, unset="no bound")
    """L2 norm to which the trained parameters of a client may change."""


@dataclasses.dataclass(frozen=True)
class AggregationOptions:
    """How the server merges uploads."""

    aggregator: Aggregator = "mean"
    """Rule that merges uploads; mean weighs clients by their examples, uniform equally."""
    trim: float = option(0.1, below=0.5, only=("aggregator", "trimmed_mean"))
    """Share of the values that trimmed_mean drops at either end."""
    malicious_bound: int = option(1, least=0, only=("aggregator", "krum", "multi_krum"))
    """Number of malicious clients that krum and multi_krum assume."""
    clip_radius: float = option(10.0, positive=True, only=("aggregator", "centred_clipping"))
    """L2 norm to which centred_clipping clips the clients' changes."""
    clip_norm: float = option(0.0, unset="no clipping")
    """L2 norm to which the change of every client is clipped."""
    noise_multiplier: float = option(0.0, unset="no noise")
    """Standard deviation of the noise over clip_norm, for central differential privacy."""
    server_optimiser: Literal["none", "momentum", "adam", "yogi"] = "none"
    """Optimiser of the server, which steps along the clients' mean change."""
    server_step: float | None = option(
        None,
        positive=True,
        only=("server_optimiser", "momentum", "adam", "yogi"),
        unset="1 for momentum, else 0.1",
    )
    """Step size of the server's optimiser."""
    server_momentum: float = option(0.9, below=1.0, only=("server_optimiser", "momentum", "adam", "yogi"))
    """Momentum (beta_1) of the server's optimiser."""
    server_adaptivity: float = option(1e-3, positive=True, only=("server_optimiser", "adam", "yogi"))
    """Adaptivity (tau) of the server's adam and yogi."""


@dataclasses.dataclass(frozen=True)
class FaultOptions:
    """Which clients misbehave, and how."""

    malicious: int = option(0, least=0)
    """Number of malicious clients: those with the lowest ids."""
    attack: Literal["sign_flip", "scale", "label_flip", "nan", "weight", "counts", "certain"] = "sign_flip"
    """What malicious clients do."""
    faults: str = option("none", unset="none")
    """Random faults per client and round with their probabilities, such as drop=0.1,noise=0.2: sign_flip,
    scale, label_flip, nan, weight, counts, certain, inf, noise, stale, late or drop."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How clients share the machine, and what is kept of a run."""

    lanes: int = option(0, least=0, unset="chosen for the device")
    """Number of clients that train at the same time."""
    lane_mode: Literal["auto", "loop", "vmap", "unroll"] = option("auto", unset="chosen for the device")
    """How the clients that train at the same time are computed."""
    batch_devices: int = option(0, least=0, unset="chosen for the devices, 1 on a CPU")
    """Number of devices that share each batch of a client; the update is the same up to rounding."""
    microbatch: int = option(0, least=0, unset="the whole batch, on accelerators what fits")
    """Most images that the network computes at a time; the update is the batch's up to rounding."""
    remat: bool = False
    """Compute the blocks of a ViT again for gradients in place of keeping what they computed."""
    eval_every_round: bool = False
    """Evaluate after every round, not only after every task."""
    checkpoint_every: int = 1
    """Rounds between checkpoints; the last round always has one."""
    keep_checkpoints: int = 2
    """Number of checkpoints that stay on disk."""


@dataclasses.dataclass(frozen=True)
class RunConfig(EngineConfig, FaultOptions, AggregationOptions, TrainConfig, PartitionConfig, InputConfig):
    """What every method shares. The defaults run on the handwritten digits with the packaged micro ViT and
    need no download."""

    method: str = ""
    """The method: a name of `fcljax list`, or FILE.py, FILE.py:NAME or MODULE:NAME from outside."""
    fidelity: Fidelity = "intended"
    """Reading of the paper where paper and release differ; improved, which some methods have, was chosen on
    held-out images."""
    scale: Scale = "auto"
    """Learning rates and server training: the paper's; those of methods/mini.py for small networks and
    images (mini); or rates that are searched on held-out training images before the first round, with mini's
    server training and --fidelity improved where the method has it (fit). auto: mini with a micro network and
    no checkpoint; else fit where a client takes a third of the preset's steps a task or fewer, or three times
    as many or more, and nothing that fit decides is given; else paper."""
    rate_factor: float = option(0.0, unset="decided or searched when the run begins")
    """Factor on all learning rates of the method, its server's included."""
    dp_delta: float = option(0.0, most=1.0, unset="not reported")
    """Delta for which the privacy spent is reported as epsilon; needs --noise-multiplier and the optional
    dependency `privacy`."""
    source: ClassVar[Any] = None
    """What `methods.find_method` finds the method by: its name, or the entry itself (`config.run_class`)."""


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """Processes that share a run, on one host or several; each gets the same options and its own number."""

    coordinator: str | None = option(None, unset="one process")
    """HOST:PORT of process 0, for a run on the devices of all processes; auto asks Slurm, Open MPI,
    Kubernetes or the TPU runtime."""
    processes: int | None = option(None, unset="the coordinator's")
    """Number of processes."""
    process: int | None = option(None, least=0, unset="the coordinator's")
    """Number of this process, from 0."""
    host_timeout: int | None = option(None, least=5, most=3600, unset="100")
    """Seconds to wait for the other processes: to start, and for a sign of life."""

    @property
    def seconds(self) -> int:
        """Of `host_timeout`."""
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
    """Options of adapters, at most one instance of each adapter's dataclass. Adapters that are not among them
    have their own preset."""


Presets = Mapping[str, Preset]  # fidelity -> preset; a fidelity that is missing is the intended one


def with_changes(presets: Presets, adapters: tuple = (), **run: Any) -> Presets:
    """Presets with other options of adapters, and other values of the run's fields."""
    return {
        name: Preset(preset.options, dataclasses.replace(preset.run, **run), adapters or preset.adapters)
        for name, preset in presets.items()
    }
