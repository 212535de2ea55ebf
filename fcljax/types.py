"""The protocol between methods and the engine: named tuples of arrays and of pure
functions, no maths.

A method is a `Method`: pure functions over pytrees that the method chooses (server state,
client state, local state, upload). Shapes are fixed for a whole run: C classes, T tasks,
K clients, batches of B examples. A task is data (an index and masks), never a Python int
inside jit, so one trace of each function serves all rounds of all tasks. Most methods are
made of parts (`parts/federate.py`); the engine plays any `Method`.

The engine passes all arguments by position, so functions may name them as they like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray
from jaxtyping import PyTree as PyTree

# The three states of a method, of any structure that it likes. First what the server
# keeps between rounds:
Server: TypeAlias = PyTree
# what one client keeps between rounds; () for stateless clients
ClientState: TypeAlias = PyTree
# what a client holds within a round: parameters, optimiser state, running sums
Local: TypeAlias = PyTree

# A number, or an array: in a search over learning rates the rates are arguments of the
# compiled program, so that all rates share it (`federated/rates.py`).
LearningRate: TypeAlias = float | Float[Array, ""]


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
    """The most examples that a client has in a round, for buffers that hold all of them;
    0: not known."""


@runtime_checkable
class MergingRule(Protocol):
    """Merges the uploads of all clients at once."""

    def __call__(
        self,
        stacked: PyTree,
        reference: PyTree,
        weight: Float[Array, " K"],
        valid: Bool[Array, " K"],
        key: PRNGKeyArray,
        /,
    ) -> PyTree:
        """Return leaves [...], merged from leaves [K, ...].

        `reference` [...] is what the clients started from; `valid` says whose upload
        arrived and is finite.
        """
        ...


@runtime_checkable
class TaskPool(Protocol):
    """Makes the pool of tasks that private streams draw from."""

    def pool(self, names: Sequence[str], sources: Int[np.ndarray, " C"]) -> list[Int[np.ndarray, " _"]]:
        """Return the classes of each task, of classes with these names from these data sets."""
        ...


class OptaxOptimiser(Protocol):
    """An optimiser of optax, such as `optax.adamw(1e-3)`. Type checkers that cannot read
    optax know this."""

    @property
    def init(self) -> Callable[..., object]:
        """Return the state for some parameters."""
        ...

    @property
    def update(self) -> Callable[..., object]:
        """Return the changes of the parameters and the next state."""
        ...


@runtime_checkable
class ClientOptimiser(Protocol):
    """Makes the optimiser of a client."""

    def build(self) -> optax.GradientTransformation:
        """Return the direction of a step from the gradient; learning rates scale it afterwards."""
        ...


class TrainingProgress(NamedTuple):
    """The position of a client's training within a task."""

    round: Int[Array, ""]
    """The round, from 0 in every task."""
    rounds: int
    """Rounds of a task."""
    epoch: Int[Array, ""]
    """The epoch of the round, from 0."""
    epochs: int
    """Epochs of a round."""


@runtime_checkable
class LearningRateSchedule(Protocol):
    """Returns the factor on all learning rates of a client."""

    def __call__(self, progress: TrainingProgress, /) -> Float[Array, ""]: ...


@runtime_checkable
class ServerOptimiser(Protocol):
    """Makes the optimiser of the server, which steps along what clients started from,
    minus their mean."""

    def build(self) -> optax.GradientTransformation:
        """Return the optimiser."""
        ...


# ---- networks --------------------------------------------------------------------------


class Frozen(NamedTuple):
    """Arrays that are never trained and that all clients share.

    They are an argument of every function: an array that jit closes over becomes a
    constant of the program.
    """

    network: PyTree
    """Parameters of the network."""
    decoder: PyTree = ()
    """Parameters of a masked autoencoder's decoder, where the checkpoint has one."""
    surrogate: PyTree = ()
    """Images of another data set [S, H, W, 3], grey levels 0..255, where a method asks
    for them."""
    rates: PyTree = ()
    """Learning rates by the names of their options, where they are data (`federated/rates.py`)."""
    text: PyTree = ()
    """CLIP's text tower with the prompts of the classes (`models.clip.ClassTexts`), where a
    method asks for them."""


class Features(NamedTuple):
    """Output of a network for a batch of examples."""

    # what classifiers read, and for most methods the only output
    cls: Float[Array, "batch width"]
    """The class token after the final norm, or the pooled feature of a network without tokens."""
    tokens: Float[Array, "batch tokens width"] | None
    """All tokens after the final norm; None: not requested."""
    taps: dict[str, Array]
    """Intermediate values by name."""
    prompts: Float[Array, "batch length width"] | None = None
    """The injected prompt tokens after the final norm; None: there are none."""


class Autoencoder(NamedTuple):
    """A masked autoencoder around a network."""

    encode: Callable[..., Array]
    """encode(params, image [B, H, W, 3], keep [B, kept]) -> latent [B, 1 + kept, D] of
    visible patches."""
    decode: Callable[..., Array]
    """decode(decoder, latent, restore [B, patches], prompt or None) -> [B, patches, patch
    * patch * 3]."""
    patch: int
    """Side of a patch in pixels."""
    patches: int
    """Patches of an image."""
    width: int
    """Width of the decoder's tokens, and so of the prompts among them."""
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Subtracted from pixels in [0, 1] that it reads and makes; it may differ from the
    network's."""
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Divisor of these pixels after the subtraction."""


class TextTower(NamedTuple):
    """The text side of a CLIP whose image side is the network."""

    features: Callable[..., Float[Array, "C E"]]
    """features(`Frozen.text`, context [M, width] or None) -> features of the classes' prompts,
    behind these context vectors."""
    width: int
    """Width of its tokens."""
    joint: int
    """E, the width of the space that both sides share."""


class Network(NamedTuple):
    """A feature extractor as methods see it."""

    init: Callable[[PRNGKeyArray], PyTree]
    """init(key) -> fresh parameters."""
    apply: Callable[..., tuple[Features, PyTree]]
    """apply(params, input [B, ...], injection or None, train, mask [B] or None) ->
    (Features, params).

    Where there are running statistics and `train` is set, the returned parameters hold
    the ones updated with the examples of the mask (None: all examples).
    """
    width: int
    """D, the width of a feature."""
    blocks: int
    """Number of blocks."""
    image: tuple[int, int, int] = (0, 0, 0)
    """Shape of one image; zeros where the input is none."""
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Subtracted from pixels in [0, 1] to make the images that it reads."""
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Divisor of these pixels after the subtraction."""
    autoencoder: Autoencoder | None = None
    """The masked autoencoder, where there is a decoder."""
    split: Callable[[PyTree], tuple[PyTree, PyTree]] | None = None
    """split(params) -> (weights, running statistics); None: all parameters are weights."""
    join: Callable[[PyTree, PyTree], PyTree] | None = None
    """join(weights, statistics) -> params, the inverse of `split`."""
    longest: Callable[[PyTree], Float[Array, ""]] | None = None
    """longest(params) -> a bound on the Euclidean norm of every feature; None: there is none."""
    text: TextTower | None = None
    """The text side, where the run has one."""


# ---- what clients and server read ------------------------------------------------------


class Task(NamedTuple):
    """One task as data.

    Classes are numbered by their position in the shuffled class order, so a task that all
    clients share has a contiguous range. Where every client has its own stream, a
    client's task has any classes, and the server's task has those of all clients. The
    host makes it of numpy arrays, and jit turns them into jax arrays.
    """

    index: Int[Array, ""]
    """Number of the task, from 0."""
    classes: Int[Array, " Ct"]
    """The task's class ids; -1 pads tasks smaller than the largest one."""
    current: Bool[Array, " C"]
    """Classes of this task."""
    seen: Bool[Array, " C"]
    """Classes of this task and of all earlier ones."""

    @property
    def old(self) -> Bool[Array, " C"]:
        """Return the classes of earlier tasks."""
        return self.seen & ~self.current

    @classmethod
    def of_numpy(
        cls, index: np.ndarray | np.int32, classes: np.ndarray, current: np.ndarray, seen: np.ndarray
    ) -> Task:
        """Make a task of numpy arrays."""
        # pyrefly: ignore[bad-argument-type]  # the fields say what methods see
        return cls(index, classes, current, seen)


class ClientInfo(NamedTuple):
    """The server's knowledge of one client in one round."""

    id: Int[Array, ""]
    """From 0 to K - 1."""
    examples: Int[Array, ""]
    """Number of its training examples."""
    class_examples: Int[Array, " C"]
    """Number of its training examples of each class."""
    round: Int[Array, ""]
    """Number of the round within the task, from 0."""

    @classmethod
    def example(cls, classes: int) -> ClientInfo:
        """Make a client with one example, for its shapes and types."""
        zero = np.int32(0)
        # pyrefly: ignore[bad-argument-type]  # the fields say what methods see
        return cls(id=zero, examples=np.int32(1), class_examples=np.zeros(classes, np.int32), round=zero)


# A client's last batch of an epoch is rarely full, and clients have different numbers of
# examples. Padding gives all batches one shape, and so one compiled program.
class Batch(NamedTuple):
    """B examples of one client, followed by those that it replays (`View.replay`).

    Examples with mask False are padding: input of zeros, label 0, index -1.
    """

    input: PyTree
    """Arrays [B, ...] as the network reads them; images are one array, [B, H, W, 3]."""
    label: Int[Array, " B"]
    """Class ids."""
    mask: Bool[Array, " B"]
    """False for padding."""
    index: Int[Array, " B"]
    """Indices into the training set."""
    query: Float[Array, "B D"] | None = None
    """Cached features of the un-prompted backbone, where the input is deterministic."""
    keys: Key[Array, " B"] | None = None
    """Keys for draws that belong to examples: they depend on (round, phase, step,
    example) alone."""
    term_weights: Float[Array, " terms"] | None = None
    """Factors of the loss's terms (`Phase.terms`); None: each counts once."""


# An argument of every function of a client. What differs between tasks, rounds and
# clients is in here as arrays, so nothing of it is compiled in.
class ClientContext(NamedTuple):
    """The inputs of a client besides its own state."""

    frozen: PyTree
    """Arrays that are never trained."""
    payload: PyTree
    """`Broadcast.payload` of this round."""
    cached: PyTree
    """`Broadcast.cached`: what clients have from earlier rounds."""
    task: Task
    """The client's task; streams may differ between clients."""
    client: ClientInfo
    """Its id and numbers of examples."""


class RoundContext(NamedTuple):
    """The inputs of a server besides its own state."""

    frozen: PyTree
    """Arrays that are never trained."""
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
        """Make a round context of Python numbers."""
        # pyrefly: ignore[bad-argument-type]  # the fields say what methods see
        return cls(frozen, task, np.int32(round_), np.bool_(last))


# ---- what crosses the network ----------------------------------------------------------


class Broadcast(NamedTuple):
    """The values that clients work with in a round."""

    payload: PyTree
    """Sent to clients in every round, and counted as download."""
    cached: PyTree = ()
    """Values that all clients have from earlier rounds, such as frozen prompts of past
    tasks; counted as extra storage."""


# Put in `mean` or `sum` whatever the server needs no more of than that: the engine adds
# them up client by client, while `gather` takes the memory of all participants at once.
class Upload(NamedTuple):
    """The upload of one client. `mean` and `sum` are streamed; `gather` reaches the
    server one per client."""

    mean: PyTree = ()
    """Averaged over clients, with `weight`."""
    sum: PyTree = ()
    """Added over clients."""
    gather: PyTree = ()
    """Stacked over clients."""
    weight: Float[Array, ""] | Int[Array, ""] | float = 1.0
    """Weight of this client in the mean, at least 0; usually its number of examples."""


class Aggregate(NamedTuple):
    """The uploads of a round with at most P participants, in the order of their ids.

    Entries of absent, dropped and non-finite clients have valid False and weight 0, and
    no sum has them.
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


# ---- what a client does ----------------------------------------------------------------


class View(NamedTuple):
    """The static description of how a phase reads examples."""

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
        """Return the new local state, and metrics of the batch."""
        ...


@runtime_checkable
class ChooseReplay(Protocol):
    """Chooses what a client replays in a step."""

    def __call__(self, context: ClientContext, local: Local, key: PRNGKeyArray, /) -> Int[Array, " replay"]:
        """Return positions in what `Program.replay_buffer` returns; -1 for none."""
        ...


class Phase(NamedTuple):
    """One or more passes over a client's examples."""

    view: View
    """How the phase reads examples."""
    step: PhaseStep
    """The client's step on a batch."""
    replay: ChooseReplay | None = None
    """Which `view.replay` examples of the replay buffer join a batch; None: none."""
    terms: tuple[str, ...] = ()
    """Names of the terms of the loss, if there are several. Before the step in the middle
    of its phase, one participant of every round takes the gradient of each term alone:
    `Batch.term_weights` is 1 for that term and 0 for the others, and nothing counts but
    the step's metric "gradient_norm"."""
    trains: bool = True
    """Whether parameters train in it. If not, it measures statistics, which no batch size
    may change."""


@runtime_checkable
class ClientStart(Protocol):
    """Prepares a client's work in a round."""

    def __call__(self, context: ClientContext, state: ClientState, key: PRNGKeyArray, /) -> Local:
        """Return the local state before the first step."""
        ...


@runtime_checkable
class ClientFinish(Protocol):
    """Ends a client's work in a round."""

    def __call__(
        self, context: ClientContext, local: Local, state: ClientState, /
    ) -> tuple[Upload, ClientState]:
        """Return what the client sends, and its new state."""
        ...


@runtime_checkable
class ReceiveUpload(Protocol):
    """Changes one upload as it arrives at the server, before it is merged: clipping, say."""

    def __call__(self, context: ClientContext, upload: Upload, /) -> Upload:
        """Return an upload of the same structure."""
        ...


# Numbers of examples become weights and divisors, so one client that lies about them
# could decide the result. Impossible claims can be refused without seeing its data.
class Claim(NamedTuple):
    """A checkable claim of a client in its upload, such as its numbers of examples."""

    name: str
    """Name of the quantity, for messages."""
    holds: Callable[[ClientContext, Upload], Bool[Array, ""]]
    """holds(context, upload) -> whether a client with so many examples can have sent it.
    The server knows `context.client.examples`, but not those of each class."""


class Program(NamedTuple):
    """A client's work in a round."""

    start: ClientStart
    """Prepares the work."""
    phases: tuple[Phase, ...]
    """Passes over the client's examples, one after the other."""
    finish: ClientFinish
    """Ends the work."""
    receive: ReceiveUpload | None = None
    """Acts on an upload as it arrives, at the server."""
    replay_buffer: Callable[[ClientState], Int[Array, " M"]] | None = None
    """replay_buffer(state) -> indices of the training examples that the client may
    replay, -1 for none.

    A client keeps indices, never images.
    """
    claims: tuple[Claim, ...] = ()
    """Claims of its uploads, besides their weight. An upload with an
    impossible claim is left out."""


# ---- what the server does --------------------------------------------------------------

# the participants of an exchange, and its time in a task (`Round`)
Who = Literal["sampled", "everyone"]
When = Literal["task_start", "round", "after_round", "task_end"]


@runtime_checkable
class ServerFunction(Protocol):
    """The server's step after the clients of a round."""

    def __call__(
        self, round_context: RoundContext, server: Server, aggregate: Aggregate, key: PRNGKeyArray, /
    ) -> tuple[Server, Metrics]:
        """Return the new server state, and metrics."""
        ...


class Predictions(NamedTuple):
    """Predictions of the test examples of all tasks so far, for a user's metric.

    Of a method with personal models they are those of all clients, one after the other.
    """

    label: Int[np.ndarray, " n"]
    """The true class of each example, in the run's class order."""
    predicted: Int[np.ndarray, " n"]
    """The predicted class among all classes so far; -1 where the outputs are not finite."""
    predicted_in_task: Int[np.ndarray, " n"]
    """The predicted class among those of the example's task."""
    confidence: Float[np.ndarray, " n"]
    """The probability of `predicted` under the softmax of all logits."""
    task_of_class: Int[np.ndarray, " C"]
    """The task that each class belongs to, from 0; -1: none yet."""


@runtime_checkable
class Metric(Protocol):
    """Measures the predictions after a task."""

    def __call__(self, predictions: Predictions, /) -> float:
        """Return one number; NaN where it is not defined."""
        ...


class Sender(NamedTuple):
    """The client for which an attack changes an upload."""

    context: ClientContext
    """What the client knows: its task, its examples, the broadcast."""
    program: Program
    """The honest program, whose claims the server checks."""
    key: PRNGKeyArray
    """Key of the client and round, for draws."""


@runtime_checkable
class Attack(Protocol):
    """Changes what a malicious client sends."""

    def __call__(self, upload: Upload, sender: Sender, /) -> Upload:
        """Return what is sent in place of an honest upload, with its structure and shapes."""
        ...


@runtime_checkable
class LabelAttack(Protocol):
    """Changes the labels that a malicious client trains on; an `Attack` may have this method too."""

    def labels(self, label: Int[Array, " B"], task: Task, /) -> Int[Array, " B"]:
        """Return the labels of a batch; those of padding are not read."""
        ...


class Round(NamedTuple):
    """One exchange between server and clients; what it sends is counted."""

    program: Program
    """The clients' work."""
    server: ServerFunction | None = None
    """The server's step with their uploads. None: the server merges nothing; clients
    only get the broadcast and change their state."""
    who: Who = "sampled"
    """The sampled participants, or every client that has examples."""
    when: When = "round"
    """Before a task's first round, in every round, after every round, or after a task's
    last round."""


# ---- a server that replays examples (`Method.server_replay`, of pMAE) ------------------


class ReplayBuffer(NamedTuple):
    """Examples that the server keeps, in whatever form."""

    examples: PyTree
    """Leaves [N, ...]."""
    label: Int[Array, " N"]
    """Class ids."""
    used: Bool[Array, " N"]
    """Which entries are filled."""


class ReplayBatch(NamedTuple):
    """A batch of examples of the server's replay buffer."""

    examples: PyTree
    """Leaves [B, ...]."""
    label: Int[Array, " B"]
    """Class ids."""
    task: Int[Array, " B"]
    """Number of the task as whose example each one is used (`ReplayPlan`)."""
    mask: Bool[Array, " B"]
    """False for padding."""
    classes: Bool[Array, " C"]
    """Classes of all examples that the server replays in this round."""


@runtime_checkable
class ReplayPlan(Protocol):
    """Says, on the host, which tasks' examples the server replays in a round."""

    def __call__(self, task: int, last: bool, /) -> tuple[tuple[int, int], ...]:
        """Return pairs of task numbers: the task whose examples are used, and the task as
        whose they count.

        `last`: whether this is the task's last round.
        """
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
        """Return the new local state, and metrics of the batch."""
        ...


class Reconstruction(NamedTuple):
    """Images, and what a server could make of what it receives of them, as pixels of
    about 0 to 1."""

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


@runtime_checkable
class Reconstruct(Protocol):
    """Reconstructs images from what the server receives of them, for a run's figures, and
    to measure what is given away."""

    def __call__(
        self,
        round_context: RoundContext,
        server: Server,
        image: Float[Array, "B H W 3"],
        key: PRNGKeyArray,
        /,
    ) -> Reconstruction:
        """Return the images and their reconstructions."""
        ...


class ServerReplay(NamedTuple):
    """Training of the server, after its step of a round, on examples that it keeps of every task.

    The server's state holds the examples of the current task. When a task is over they
    move to the host, and come back in batches.
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
    """start(round_context, server) -> the local state before the first step."""
    step: ReplayStep
    """The server's step on a batch."""
    finish: Callable[[RoundContext, Server, Local], Server]
    """finish(round_context, server, local) -> the new server state."""
    reconstruct: Reconstruct | None = None
    """What the server could reconstruct of images, where the examples that it keeps
    disclose them."""


# ---- the whole -------------------------------------------------------------------------


@runtime_checkable
class Predict(Protocol):
    """Predicts with the global model."""

    def __call__(self, round_context: RoundContext, server: Server, batch: Batch, /) -> Float[Array, "B C"]:
        """Return logits, with the lowest finite value for classes not seen yet."""
        ...


@runtime_checkable
class PredictClient(Protocol):
    """Predicts with a client's personal model."""

    def __call__(
        self, round_context: RoundContext, server: Server, state: ClientState, batch: Batch, /
    ) -> Float[Array, "B C"]:
        """Return logits."""
        ...


# the defaults of `Method`: stateless clients, and a server that does nothing between
# tasks
def _no_client_state(_key: PRNGKeyArray, _server: Server) -> ClientState:
    return ()


def _unchanged_server(_round_context: RoundContext, server: Server, _key: PRNGKeyArray) -> Server:
    return server


class Method(NamedTuple):
    """A federated continual learning method: pure functions, all of them traced once for
    a whole run."""

    init: Callable[[PRNGKeyArray, PyTree], Server]
    """init(key, frozen) -> the first server state."""
    broadcast: Callable[[RoundContext, Server], Broadcast]
    """broadcast(round_context, server) -> all that clients get."""
    # Several exchanges can share a time, for example a report after each training round.
    # They are played in this order.
    rounds: tuple[Round, ...]
    """Exchanges between server and clients, for every task."""
    predict: Predict
    """Logits of the global model."""
    init_client: Callable[[PRNGKeyArray, Server], ClientState] = _no_client_state
    """init_client(key, server) -> the state of one client before it ever takes part."""
    begin_task: Callable[[RoundContext, Server, PRNGKeyArray], Server] = _unchanged_server
    """begin_task(round_context, server, key) -> the server state before the first round
    of a task."""
    queries: bool = False
    """Whether steps and `predict` read the class token of the frozen network without
    prompts. It is cached wherever images are deterministic."""
    batchwise: tuple[str, ...] = ()
    """Options of the run that make a prediction depend on the other examples of its batch;
    (): it never does, as `fcljax check` tests."""
    predict_client: PredictClient | None = None
    """Logits of a client's personal model."""
    trainable: Callable[[RoundContext, Server], dict[str, PyTree]] | None = None
    """trainable(round_context, server) -> named parts of what a client trains, for
    counting only."""
    handover: Callable[[RoundContext, Server], PyTree] | None = None
    """handover(round_context, server) -> what clients get of the finished task when the
    next one begins.

    No round has sent them its last state, and they cache it from then on. For counting only.
    """
    aggregation: str = "mean"
    """Name of the rule that merges uploads."""
    predict_provisional: Predict | None = None
    """Logits of the merged model, before the server's training changes it."""
    server_replay: ServerReplay | None = None
    """Training of the server on examples that it keeps, after every round in which
    clients train."""
    predict_drawn: PredictClient | None = None
    """Logarithms of the mean probabilities of a Bayesian personal model over parameters
    drawn from its posterior, for calibration."""
    names_classes: bool = False
    """Whether names of classes make the classifier. A run then has the accuracy on classes of
    later tasks, among these, too."""
    personal: bool = False
    """Whether a run's accuracy is that of personal models. Each client is then evaluated
    on the classes that it has learned, and `predict` is the server's model alone."""
