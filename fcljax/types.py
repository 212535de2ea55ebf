"""The protocol between methods and the engine: named tuples of arrays and of pure functions, no maths.

A method is a `Method`: pure functions over its own pytrees (server state, client state, local training
state, upload). Shapes are fixed for a whole run: C classes, T tasks, K clients, batches of B examples. A task
is data (an index and masks), never a Python int inside jit, so one trace of each function serves all rounds
of all tasks. Most methods are made of parts (`parts/federate.py`); the engine plays any `Method`.

The engine passes all arguments by position, so functions may name them as they like.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray
from jaxtyping import PyTree as PyTree

Server: TypeAlias = PyTree  # everything the server keeps between rounds
ClientState: TypeAlias = PyTree  # everything one client keeps between rounds; () for stateless clients
Local: TypeAlias = PyTree  # what a client holds while it works: parameters, optimiser state, running sums


LearningRate: TypeAlias = float | Float[Array, ""]  # an array where rates are data (`federated/rates.py`)


class Weighted(NamedTuple):
    """A metric that adds up over batches, clients and devices. Its mean is total / weight."""

    total: Float[Array, ""]
    """Sum of value * weight."""
    weight: Float[Array, ""]
    """Sum of the weights."""


Metrics: TypeAlias = dict[str, Weighted]


class Sizes(NamedTuple):
    """The static sizes of a run, from which methods make their shapes."""

    classes: int
    """C."""
    tasks: int
    """T."""
    task_classes: int
    """Ct, the classes of the largest task."""
    clients: int
    """K."""
    rounds: int = 1
    """Rounds per task, for schedules over the rounds of a task."""
    examples: int = 0
    """The most examples that a client has in a round, for buffers that hold all of them; 0: not known."""


# ---- networks ----------------------------------------------------------------------------------------------


class Frozen(NamedTuple):
    """What is never trained and shared by all clients: an argument everywhere."""

    network: PyTree
    """Parameters of the network."""
    decoder: PyTree = ()
    """Parameters of a masked autoencoder's decoder, where the checkpoint has one."""
    surrogate: PyTree = ()
    """Images of another data set [S, H, W, 3], grey levels 0..255, where a method asks for them."""
    rates: PyTree = ()
    """Learning rates by the names of their options, where they are data (`federated/rates.py`)."""


class Features(NamedTuple):
    """What a network computes from images."""

    cls: Float[Array, "batch width"]
    """The class token after the final norm, or what stands for it in a network without tokens."""
    tokens: Float[Array, "batch tokens width"] | None
    """All tokens after the final norm, if they were asked for."""
    taps: dict[str, Array]
    """Named intermediate values."""
    prompts: Float[Array, "batch length width"] | None = None
    """The injected prompt tokens after the final norm, if there are any."""


class Autoencoder(NamedTuple):
    """A masked autoencoder around a network."""

    encode: Callable[..., Array]
    """encode(params, image [B, H, W, 3], keep [B, kept]) -> latent [B, 1 + kept, D] of visible patches."""
    decode: Callable[..., Array]
    """decode(decoder, latent, restore [B, patches], prompt or None) -> [B, patches, patch * patch * 3]."""
    patch: int
    """Side of a patch in pixels."""
    patches: int
    """Patches of an image."""
    width: int
    """Width of the decoder's tokens, and so of the prompts among them."""
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Subtracted from pixels in [0, 1] that it reads and makes; it may differ from the network's."""
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """What these pixels are then divided by."""


class Network(NamedTuple):
    """A feature extractor as methods see it."""

    init: Callable[[PRNGKeyArray], PyTree]
    """init(key) -> fresh parameters."""
    apply: Callable[..., tuple[Features, PyTree]]
    """apply(params, image [B, H, W, 3], injection or None, train, mask [B] or None) -> (Features, params).

    Where there are running statistics and `train` is set, the returned parameters hold the ones updated with
    the examples of the mask (None: all examples).
    """
    width: int
    """D, the width of a feature."""
    blocks: int
    """Number of blocks."""
    image: tuple[int, int, int]
    """Shape of one image."""
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Subtracted from pixels in [0, 1] to make the images that it is given."""
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """What these pixels are then divided by."""
    autoencoder: Autoencoder | None = None
    """The masked autoencoder, where there is a decoder."""
    split: Callable[[PyTree], tuple[PyTree, PyTree]] | None = None
    """split(params) -> (weights, running statistics); None: all parameters are weights."""
    join: Callable[[PyTree, PyTree], PyTree] | None = None
    """join(weights, statistics) -> params, the inverse of `split`."""


# ---- what clients and server read --------------------------------------------------------------------------


class Task(NamedTuple):
    """One task as data.

    Classes are numbered by their position in the shuffled class order, so that a task that all clients share
    has a contiguous range. Where clients have streams of their own, a client's task has any classes, and the
    server's those of all clients. The host makes it of numpy arrays, and jit turns them into jax arrays.
    """

    index: Int[Array, ""]
    """Number of the task, from 0."""
    classes: Int[Array, " Ct"]
    """The task's class ids; -1 pads tasks smaller than the largest one."""
    current: Bool[Array, " C"]
    """Classes of this task."""
    seen: Bool[Array, " C"]
    """Classes of this task and all before it."""

    @property
    def old(self) -> Bool[Array, " C"]:
        """Classes of earlier tasks."""
        return self.seen & ~self.current

    @classmethod
    def of_numpy(
        cls, index: np.ndarray | np.int32, classes: np.ndarray, current: np.ndarray, seen: np.ndarray
    ) -> Task:
        """A task made on the host."""
        # pyrefly: ignore[bad-argument-type]  # the fields say what methods see
        return cls(index, classes, current, seen)


class ClientInfo(NamedTuple):
    """What is known of one client in one round."""

    id: Int[Array, ""]
    """From 0 to K - 1."""
    examples: Int[Array, ""]
    """Number of its training examples."""
    class_examples: Int[Array, " C"]
    """The same for each class."""
    round: Int[Array, ""]
    """Number of the round within the task, from 0."""

    @classmethod
    def example(cls, classes: int) -> ClientInfo:
        """A client with one example, made on the host for its shapes and types."""
        zero = np.int32(0)
        one = np.int32(1)
        # pyrefly: ignore[bad-argument-type]  # the fields say what methods see
        return cls(zero, one, np.zeros(classes, np.int32), zero)


class Batch(NamedTuple):
    """B examples of one client, followed by those that it replays (`View.replay`).

    Examples with mask False are padding: zero images, label 0, index -1.
    """

    image: Float[Array, "B H W 3"]
    """Images as the network reads them."""
    label: Int[Array, " B"]
    """Class ids."""
    mask: Bool[Array, " B"]
    """False for padding."""
    index: Int[Array, " B"]
    """Indices into the training set."""
    query: Float[Array, "B D"] | None = None
    """Cached features of the un-prompted backbone, where images are deterministic."""
    keys: Key[Array, " B"] | None = None
    """Keys for draws that belong to examples: they depend on (round, phase, step, example) alone."""
    measured: Bool[Array, ""] | None = None
    """Whether the step measures itself too (`Phase.measures`); None: its phase measures nothing."""


class ClientContext(NamedTuple):
    """All that a client may read besides its own state."""

    frozen: PyTree
    """What is never trained."""
    payload: PyTree
    """What the server has just sent."""
    cached: PyTree
    """What clients have from earlier rounds."""
    task: Task
    """The client's own task; streams may differ between clients."""
    client: ClientInfo
    """What is known of the client."""


class RoundContext(NamedTuple):
    """All that a server may read besides its own state."""

    frozen: PyTree
    """What is never trained."""
    task: Task
    """The current task."""
    round: Int[Array, ""]
    """Number of the round within the task, from 0."""
    last: Bool[Array, ""]
    """Whether this is the last round of the task."""
    previous: PyTree = ()
    """The `Broadcast` that clients worked from; () where nothing was sent."""

    @classmethod
    def on_host(cls, frozen: PyTree, task: Task, round_: int, last: bool) -> RoundContext:
        """A round context made on the host."""
        # pyrefly: ignore[bad-argument-type]  # the fields say what methods see
        return cls(frozen, task, np.int32(round_), np.bool_(last))


# ---- what crosses the network ------------------------------------------------------------------------------


class Broadcast(NamedTuple):
    """What a client works from."""

    payload: PyTree
    """Sent to clients in every round, and counted as download."""
    cached: PyTree = ()
    """What every client already has from earlier rounds, such as frozen prompts of past tasks. It is counted
    as extra storage."""


class Upload(NamedTuple):
    """What one client sends. `mean` and `sum` are streamed; `gather` reaches the server one per client."""

    mean: PyTree = ()
    """Averaged over clients, with `weight`."""
    sum: PyTree = ()
    """Added over clients."""
    gather: PyTree = ()
    """Stacked over clients."""
    weight: Float[Array, ""] | Int[Array, ""] | float = 1.0
    """Of this client in the mean, at least 0; usually its number of examples."""


class Aggregate(NamedTuple):
    """What the server sees after a round of at most P participants, in the order of their ids.

    Absent, dropped and non-finite clients have valid False and weight 0, and are in no sum.
    """

    mean: PyTree
    """The weighted mean of `Upload.mean`."""
    sum: PyTree
    """The sum of `Upload.sum`."""
    gather: PyTree
    """`Upload.gather` stacked to leaves [P, ...]."""
    weight: Float[Array, " P"]
    """The clients' weights."""
    id: Int[Array, " P"]
    """The clients' ids."""
    valid: Bool[Array, " P"]
    """Which entries are clients whose upload arrived."""


# ---- what a client does ------------------------------------------------------------------------------------


class View(NamedTuple):
    """How a phase reads a client's examples. All of it is static."""

    epochs: int
    """Passes over the examples."""
    batch_size: int
    """B."""
    shuffle: bool = True
    """Whether each epoch has an order of its own."""
    augment: bool = True
    """Whether images are augmented as in training, or clean."""
    replay: int = 0
    """Examples of the client's replay buffer that join every batch, under the clean view."""


@runtime_checkable
class PhaseStep(Protocol):
    """One step of a client on a batch."""

    def __call__(
        self, context: ClientContext, local: Local, batch: Batch, key: PRNGKeyArray, /
    ) -> tuple[Local, Metrics]:
        """The new local state, and metrics of the batch."""
        ...


@runtime_checkable
class ChooseReplay(Protocol):
    """Chooses what a client replays in a step."""

    def __call__(self, context: ClientContext, local: Local, key: PRNGKeyArray, /) -> Int[Array, " replay"]:
        """Positions in what `Program.replay_buffer` returns; -1 for none."""
        ...


class Phase(NamedTuple):
    """One or more passes over a client's own examples."""

    view: View
    """How the examples are read."""
    step: PhaseStep
    """What is done with a batch."""
    replay: ChooseReplay | None = None
    """Which `view.replay` examples of the replay buffer join a batch; None: none."""
    measures: bool = False
    """Whether `batch.measured` is True at one participant of every round, in the step in the middle of its
    phase. Metrics that a step has only then have weight 0 otherwise."""
    trains: bool = True
    """Whether parameters train in it. If not, it measures statistics, which no batch size may change."""


@runtime_checkable
class ClientStart(Protocol):
    """Prepares a client's work in a round."""

    def __call__(self, context: ClientContext, state: ClientState, key: PRNGKeyArray, /) -> Local:
        """The local state before the first step."""
        ...


@runtime_checkable
class ClientFinish(Protocol):
    """Ends a client's work in a round."""

    def __call__(
        self, context: ClientContext, local: Local, state: ClientState, /
    ) -> tuple[Upload, ClientState]:
        """What the client sends, and what it keeps."""
        ...


@runtime_checkable
class ReceiveUpload(Protocol):
    """Acts on one upload as it arrives at the server, before it is merged: clipping, say."""

    def __call__(self, context: ClientContext, upload: Upload, /) -> Upload:
        """An upload of the same structure."""
        ...


class Claim(NamedTuple):
    """What a client says of itself in an upload, such as its numbers of examples."""

    name: str
    """Of the quantity, for messages."""
    holds: Callable[[ClientContext, Upload], Bool[Array, ""]]
    """holds(context, upload) -> whether a client with so many examples can have sent it. The server knows
    `context.client.examples`, but not those of each class."""


class Program(NamedTuple):
    """Everything a client does in a round."""

    start: ClientStart
    """Prepares the work."""
    phases: tuple[Phase, ...]
    """Passes over the client's examples, one after the other."""
    finish: ClientFinish
    """Ends the work."""
    receive: ReceiveUpload | None = None
    """What the server does to an upload as it arrives; None: nothing."""
    replay_buffer: Callable[[ClientState], Int[Array, " M"]] | None = None
    """replay_buffer(state) -> indices of the training examples that the client may replay, -1 for none.

    A client keeps indices, never images.
    """
    claims: tuple[Claim, ...] = ()
    """What its uploads say of the client, besides their weight; an upload that cannot be true is left out."""


# ---- what the server does ----------------------------------------------------------------------------------

Who = Literal["sampled", "everyone"]
When = Literal["task_start", "round", "after_round", "task_end"]


@runtime_checkable
class ServerFunction(Protocol):
    """The server's step after the clients of a round."""

    def __call__(
        self, round_context: RoundContext, server: Server, aggregate: Aggregate, key: PRNGKeyArray, /
    ) -> tuple[Server, Metrics]:
        """The new server state, and metrics."""
        ...


class Round(NamedTuple):
    """One exchange between server and clients; what it sends is counted."""

    program: Program
    """What clients do."""
    server: ServerFunction | None = None
    """What the server does with their uploads. None: nothing is merged; clients only get the broadcast and
    change their state."""
    who: Who = "sampled"
    """The sampled participants, or every client that has examples."""
    when: When = "round"
    """Before a task's first round, in every round, after every round, or after a task's last round."""


class ReplayBuffer(NamedTuple):
    """Examples that the server keeps, in whatever form."""

    examples: PyTree
    """Leaves [N, ...]."""
    label: Int[Array, " N"]
    """Class ids."""
    used: Bool[Array, " N"]
    """Which entries are filled."""


class ReplayBatch(NamedTuple):
    """Some of the examples that the server keeps."""

    examples: PyTree
    """Leaves [B, ...]."""
    label: Int[Array, " B"]
    """Class ids."""
    task: Int[Array, " B"]
    """As whose task's example each is used."""
    mask: Bool[Array, " B"]
    """False for padding."""
    classes: Bool[Array, " C"]
    """Classes of all examples that are replayed in this round."""


@runtime_checkable
class ReplayPlan(Protocol):
    """Says, on the host, which tasks' examples the server replays in a round."""

    def __call__(self, task: int, last: bool, /) -> tuple[tuple[int, int], ...]:
        """Pairs of task numbers: whose examples are used, and as whose. `last`: in the task's last round."""
        ...


@runtime_checkable
class ReplayStep(Protocol):
    """One step of the server on a batch of its replay buffer."""

    def __call__(
        self,
        round_context: RoundContext,
        server: Server,
        local: Local,
        batch: ReplayBatch,
        key: PRNGKeyArray,
        /,
    ) -> tuple[Local, Metrics]:
        """The new local state, and metrics of the batch."""
        ...


class ServerReplay(NamedTuple):
    """Training of the server, after its step of a round, on examples that it keeps of every task.

    Its state holds those of the current task. When a task is over they move to the host, and come back in
    batches.
    """

    buffer: Callable[[RoundContext, Server], ReplayBuffer]
    """buffer(round_context, server) -> examples of the current task."""
    plan: ReplayPlan
    """Which tasks' examples are replayed."""
    epochs: int
    """Passes over them in a round."""
    batch_size: int
    """Examples of a step."""
    start: Callable[[RoundContext, Server], Local]
    """start(round_context, server) -> what the training changes."""
    step: ReplayStep
    """One step."""
    finish: Callable[[RoundContext, Server, Local], Server]
    """finish(round_context, server, local) -> the new server state."""


class Reconstruction(NamedTuple):
    """Images, and what a server could make of what it receives of them, as pixels of about 0 to 1."""

    original: Float[Array, "B H W 3"]
    """The images themselves."""
    masked: Float[Array, "B H W 3"]
    """With hidden patches in grey."""
    unprompted: Float[Array, "B H W 3"]
    """Reconstructed by the frozen autoencoder alone."""
    restored: Float[Array, "B H W 3"]
    """Reconstructed as the method does it."""
    hidden: Bool[Array, "B H W 3"]
    """Pixels of hidden patches."""


# ---- the whole ---------------------------------------------------------------------------------------------


@runtime_checkable
class Predict(Protocol):
    """Predicts with the global model."""

    def __call__(self, round_context: RoundContext, server: Server, batch: Batch, /) -> Float[Array, "B C"]:
        """Logits; the lowest finite value for classes not seen yet."""
        ...


@runtime_checkable
class PredictClient(Protocol):
    """Predicts with a client's personal model."""

    def __call__(
        self, round_context: RoundContext, server: Server, state: ClientState, batch: Batch, /
    ) -> Float[Array, "B C"]:
        """Logits."""
        ...


@runtime_checkable
class Reconstruct(Protocol):
    """Makes of images what the server could reconstruct of what it receives of them."""

    def __call__(
        self,
        round_context: RoundContext,
        server: Server,
        image: Float[Array, "B H W 3"],
        key: PRNGKeyArray,
        /,
    ) -> Reconstruction:
        """For a run's figures, and to measure what is given away."""
        ...


def _no_state(key: PRNGKeyArray, server: Server) -> ClientState:
    del key, server
    return ()


def _same(round_context: RoundContext, server: Server, key: PRNGKeyArray) -> Server:
    del round_context, key
    return server


class Method(NamedTuple):
    """A federated continual learning method: pure functions, all of them traced once for a whole run."""

    init: Callable[[PRNGKeyArray, PyTree], Server]
    """init(key, frozen) -> the first server state."""
    broadcast: Callable[[RoundContext, Server], Broadcast]
    """broadcast(round_context, server) -> exactly what clients get."""
    rounds: tuple[Round, ...]
    """What is played in every task."""
    predict: Predict
    """Logits of the global model."""
    init_client: Callable[[PRNGKeyArray, Server], ClientState] = _no_state
    """init_client(key, server) -> the state of one client before it ever takes part."""
    begin_task: Callable[[RoundContext, Server, PRNGKeyArray], Server] = _same
    """begin_task(round_context, server, key) -> the server state before the first round of a task."""
    queries: bool = False
    """Whether steps and `predict` read the frozen network's own class token of an image. It is cached
    wherever images are deterministic."""
    batchwise: tuple[str, ...] = ()
    """Options of the run by which a prediction depends on the other images of its batch; (): it does not, as
    `fcljax check` tests."""
    predict_client: PredictClient | None = None
    """Logits of a client's personal model."""
    trainable: Callable[[RoundContext, Server], dict[str, PyTree]] | None = None
    """trainable(round_context, server) -> named parts of what a client trains, for counting only."""
    handover: Callable[[RoundContext, Server], PyTree] | None = None
    """handover(round_context, server) -> what clients get, when a task begins, of the task that is over.

    They cache it from then on, and no round has sent them its last state. For counting only.
    """
    aggregation: str = "mean"
    """Name of the rule that merges uploads."""
    predict_provisional: Predict | None = None
    """Logits of what was merged, before the server's own training changed it."""
    server_replay: ServerReplay | None = None
    """Training of the server on examples that it keeps, after every round in which clients train."""
    predict_drawn: PredictClient | None = None
    """Logarithms of the mean probabilities of a Bayesian personal model over parameters drawn from its
    posterior, for calibration."""
    restores: Reconstruct | None = None
    """What the server could reconstruct of images."""
    personal: bool = False
    """Whether the personal model is the one that counts. Clients are then evaluated, each on the classes that
    it has learned, and `predict` says what the server alone would."""
