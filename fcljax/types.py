"""The protocol between methods and the engine: named tuples of arrays and of pure functions, no maths.

A method is a `Method`: pure functions over its own pytrees (server state, client state, local training
state, upload). Shapes are fixed for a whole run: C classes, T tasks, K clients, B rows a batch. A task is
data (an index and masks), never a Python int inside jit, so one trace of each function serves all rounds of
all tasks. Most methods are made of parts (`federate.py`); the engine plays any `Method`.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray
from jaxtyping import PyTree as PyTree

Server: TypeAlias = PyTree  # everything the server keeps between rounds
ClientState: TypeAlias = PyTree  # everything one client keeps between rounds; () for stateless clients
Local: TypeAlias = PyTree  # what a client holds while it works: parameters, optimiser state, running sums


class Weighted(NamedTuple):
    """A metric that adds up: sums over workers and batches of value * weight, and of weight. Its mean is
    total / weight."""

    total: Float[Array, ""]
    weight: Float[Array, ""]


Metrics: TypeAlias = dict[str, Weighted]


class Sizes(NamedTuple):
    """The static sizes of a run, from which methods make their shapes."""

    classes: int  # C
    tasks: int  # T
    task_classes: int  # Ct: classes of the largest task
    clients: int  # K
    rounds: int = 1  # per task, for schedules that run over a task's rounds
    examples: int = 0  # the most that a client holds in a round, for what gathers all of them; 0: not known


class Frozen(NamedTuple):
    """What is never trained and shared by all clients: an argument everywhere."""

    network: PyTree
    decoder: PyTree = ()  # of a masked autoencoder, where the checkpoint has one
    surrogate: PyTree = ()  # images of another data set [S, H, W, 3], grey levels 0..255, where a method asks


class Features(NamedTuple):
    """What a network says of images. cls: class token after the final norm, if there is one. tokens: all
    tokens likewise, if asked for. taps: named intermediates. prompts: what became of injected tokens."""

    cls: Float[Array, "batch width"]
    tokens: Float[Array, "batch tokens width"] | None
    taps: dict[str, Array]
    prompts: Float[Array, "batch length width"] | None = None


class Autoencoder(NamedTuple):
    """A masked autoencoder around a network.

    encode(params, image [B, H, W, 3], keep [B, kept]) -> latent [B, 1 + kept, D] of the patches that stay
    decode(decoder, latent, restore [B, patches], prompt or None) -> pixels [B, patches, patch * patch * 3]
    """

    encode: Callable[..., Array]
    decode: Callable[..., Array]
    patch: int  # side of a patch in pixels
    patches: int  # of an image
    width: int  # of the decoder's tokens, and so of prompts among them
    # pixel constants of the images that it reads and makes, which need not be the network's
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)


class Network(NamedTuple):
    """A feature extractor as methods see it.

    init(key) -> fresh parameters
    apply(params, image [B, H, W, 3], injection or None, train, mask [B]) -> (Features, params): with running
      statistics, where there are any, that have moved if `train`, by the rows of the mask; None: by all
    split(params) -> (weights, running statistics), and join(weights, statistics) -> params; None: the network
      has no statistics, and params are all weights
    """

    init: Callable[[PRNGKeyArray], PyTree]
    apply: Callable[..., tuple[Features, PyTree]]
    width: int
    blocks: int
    image: tuple[int, int, int]  # shape of one image
    # pixel constants of the images that it is given: what was taken off pixels in [0, 1]
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)  # and what they were divided by
    autoencoder: Autoencoder | None = None  # where there is a decoder
    split: Callable[[PyTree], tuple[PyTree, PyTree]] | None = None
    join: Callable[[PyTree, PyTree], PyTree] | None = None


class Task(NamedTuple):
    """One task as data. Classes are numbered by their position in the shuffled class order, so that a task
    that all clients share owns a contiguous range; with streams of their own a client's task has any classes,
    and the server's those of all clients. The host makes it of numpy arrays, and jit turns them into
    jax's."""

    index: Int[Array, ""]
    classes: Int[Array, " Ct"]  # the task's class ids; -1 pads tasks smaller than the largest one
    current: Bool[Array, " C"]  # classes of this task
    seen: Bool[Array, " C"]  # classes of this task and all before it

    @property
    def old(self) -> Bool[Array, " C"]:
        """Classes of earlier tasks."""
        return self.seen & ~self.current

    @classmethod
    def of_numpy(
        cls, index: np.ndarray | np.int32, classes: np.ndarray, current: np.ndarray, seen: np.ndarray
    ) -> "Task":
        """A task made on the host."""
        # pyrefly: ignore[bad-argument-type]  # the fields say what methods see
        return cls(index, classes, current, seen)


class ClientInfo(NamedTuple):
    """What is known of one client in one round: its id, its number of rows (in all and per class), and the
    round in the task."""

    id: Int[Array, ""]
    examples: Int[Array, ""]
    class_examples: Int[Array, " C"]
    round: Int[Array, ""]

    @classmethod
    def example(cls, classes: int) -> "ClientInfo":
        """Made on the host, of a client with one row, of which shapes and types count."""
        zero, one = np.int32(0), np.int32(1)
        # pyrefly: ignore[bad-argument-type]  # the fields say what methods see
        return cls(zero, one, np.zeros(classes, np.int32), zero)


class Batch(NamedTuple):
    """B rows of one client, and after them the rows that it recalls (`View.recall`). Rows with mask False
    are padding: zero images, label 0, row -1."""

    image: Float[Array, "B H W 3"]
    label: Int[Array, " B"]
    mask: Bool[Array, " B"]
    index: Int[Array, " B"]
    # cached features of the un-prompted backbone, where the input is deterministic
    query: Float[Array, "B D"] | None = None
    # keys of what a step draws for each row: of the round, the phase, the step and the row, whoever holds it
    keys: Key[Array, " B"] | None = None


class ClientContext(NamedTuple):
    """All that a client may read: the frozen network, what was broadcast, its own task (streams may differ
    between clients) and what is known of it."""

    frozen: PyTree
    payload: PyTree
    cached: PyTree
    task: Task
    client: ClientInfo


class RoundContext(NamedTuple):
    """All that a server may read besides its own state. `previous` is what was broadcast; () where nothing
    was."""

    frozen: PyTree
    task: Task
    round: Int[Array, ""]
    last: Bool[Array, ""]  # is this the last round of the task?
    previous: PyTree = ()

    @classmethod
    def on_host(cls, frozen: PyTree, task: Task, round_: int, last: bool) -> "RoundContext":
        """A turn made on the host, of numbers."""
        # pyrefly: ignore[bad-argument-type]  # the fields say what methods see
        return cls(frozen, task, np.int32(round_), np.bool_(last))


class Broadcast(NamedTuple):
    """What a client works from. `wire` crosses the network every round and is counted as download; `held` is
    what every client already has from earlier rounds (frozen prompts of past tasks, say) and is counted as
    extra storage."""

    payload: PyTree
    cached: PyTree = ()


class Upload(NamedTuple):
    """What one client sends. `mean` leaves are averaged with `weight`, `sum` leaves are added; both are
    streamed. `gather` leaves reach the server one per client."""

    mean: PyTree = ()
    sum: PyTree = ()
    gather: PyTree = ()
    weight: Float[Array, ""] | Int[Array, ""] | float = 1.0


class Aggregate(NamedTuple):
    """What the server sees after a round. Absent, dropped and non-finite clients have valid False and weight
    0 and are in no sum.

    Rows of `gather`, `weight`, `id` and `valid` are the round's participants in the order of their ids,
    padded to P.
    """

    mean: PyTree
    sum: PyTree
    gather: PyTree
    weight: Float[Array, " P"]
    id: Int[Array, " P"]
    valid: Bool[Array, " P"]


class View(NamedTuple):
    """How a phase reads a client's rows: static. `augment` asks the data layer for the training view, else
    the clean one. `recall` rows of the client's past join every batch, under the clean view."""

    epochs: int
    batch_size: int
    shuffle: bool = True
    augment: bool = True
    recall: int = 0


class Phase(NamedTuple):
    """One pass, or E passes, over a client's own rows.

    step(ctx, local, batch, key) -> (local, metrics)
    recall(ctx, local, key) -> places [view.recall] in what `Program.memory` names, -1 for none
    """

    view: View
    step: Callable[[ClientContext, Local, Batch, PRNGKeyArray], tuple[Local, Metrics]]
    recall: Callable[[ClientContext, Local, PRNGKeyArray], Int[Array, " recall"]] | None = None


class Program(NamedTuple):
    """Everything a client does when it is called.

    start(ctx, state, key) -> local
    finish(ctx, local, state) -> (upload, state)
    receive(ctx, upload) -> upload: what the server does to an upload as it arrives, before it is merged
    memory(state) -> ids [M] of the training rows that the client may recall, -1 for none: a client keeps row
      numbers, never images
    """

    start: Callable[[ClientContext, ClientState, PRNGKeyArray], Local]
    phases: tuple[Phase, ...]
    finish: Callable[[ClientContext, Local, ClientState], tuple[Upload, ClientState]]
    receive: Callable[[ClientContext, Upload], Upload] | None = None
    memory: Callable[[ClientState], Int[Array, " M"]] | None = None


Who = Literal["sampled", "everyone"]
When = Literal["opening", "round", "closing", "refresh"]


class Round(NamedTuple):
    """One exchange between server and clients; what it sends is counted.

    server(turn, server, aggregate, key) -> (server, metrics); None: nothing is merged, clients only get the
      broadcast and change their state
    who: the sampled participants, or every client that has rows
    when: before a task's first round, in every round, after a task's last round, or in every round after
      those of "round"
    """

    program: Program
    server: Callable[[RoundContext, Server, Aggregate, PRNGKeyArray], tuple[Server, Metrics]] | None = None
    who: Who = "sampled"
    when: When = "round"


class ReplayBuffer(NamedTuple):
    """Rows that the server keeps: anything [N, ...], their labels, and which of the places are taken."""

    rows: PyTree
    label: Int[Array, " N"]
    used: Bool[Array, " N"]


class ReplayBatch(NamedTuple):
    """Some of the rows that the server keeps. `task`: as whose each is taken. `classes`: those of all rows
    that it trains on now."""

    rows: PyTree
    label: Int[Array, " B"]
    task: Int[Array, " B"]
    mask: Bool[Array, " B"]
    classes: Bool[Array, " C"]


class ServerReplay(NamedTuple):
    """Training of the server, after its part of a round, on rows that it keeps of every task. Its state holds
    those of the current task; when a task is over they move to the host, and come back in batches.

    kept(turn, server) -> Kept: rows of the current task
    plan(task, last) -> pairs of numbers of tasks, on the host: whose rows are trained on in a round of this
      task, and as whose each is taken; `last`: in its last round
    start(turn, server) -> local, what the training changes
    step(turn, server, local, batch, key) -> (local, metrics)
    finish(turn, server, local) -> server
    """

    kept: Callable[[RoundContext, Server], ReplayBuffer]
    plan: Callable[[int, bool], tuple[tuple[int, int], ...]]
    epochs: int
    batch_size: int
    start: Callable[[RoundContext, Server], Local]
    step: Callable[[RoundContext, Server, Local, ReplayBatch, PRNGKeyArray], tuple[Local, Metrics]]
    finish: Callable[[RoundContext, Server, Local], Server]


class Restored(NamedTuple):
    """Images and what a server could make of what it is sent of them, as pixels of about 0 to 1."""

    original: Float[Array, "B H W 3"]
    masked: Float[Array, "B H W 3"]  # hidden patches are grey
    unprompted: Float[Array, "B H W 3"]  # by the frozen autoencoder alone
    restored: Float[Array, "B H W 3"]  # as the method does it
    hidden: Bool[Array, "B H W 3"]  # pixels of hidden patches


def _no_state(key: PRNGKeyArray, server: Server) -> ClientState:
    del key, server
    return ()


def _same(round_context: RoundContext, server: Server, key: PRNGKeyArray) -> Server:
    del round_context, key
    return server


class Method(NamedTuple):
    """A federated continual learning method: pure functions, all of them traced once for a whole run.

    init(key, frozen) -> server
    broadcast(turn, server) -> Broadcast: exactly what clients get
    rounds: what is played in every task
    predict(turn, server, batch) -> logits [B, C], the lowest finite value for classes not seen yet
    init_client(key, server) -> state of one client before it ever takes part
    begin_task(turn, server, key) -> server, before the first round of a task
    end_task(turn, server, key) -> server, after the last round of a task
    queries: do steps and predict read the frozen network's own class token of an image? It is cached
      wherever the image is deterministic
    predict_client(turn, server, state, batch) -> logits of a client's personal model
    personal: is that the model that counts? Then clients are evaluated, each on the classes that it has
      learned, and `predict` says what the server alone would
    predict_drawn(turn, server, state, batch) -> the same of a Bayesian personal model, by parameters drawn
      from its posterior: logarithms of mean probabilities; for a run's calibration
    trainable(turn, server) -> named parts of what a client trains, for counting only
    handover(turn, server) -> what clients get, when a task begins, of the one that is over, since they hold
      it from then on and no round has sent them its last state; for counting only
    aggregation: the rule that merges what clients send, by name
    predict_provisional(turn, server, batch) -> logits of what was merged, before the server changed it
    rehearsal: training of the server on rows that it keeps, after every round in which clients train
    restores(turn, server, image [B, H, W, 3], key) -> Restored: what the server could rebuild of images, for
      the run's figures and a measurement of what is given away
    """

    init: Callable[[PRNGKeyArray, PyTree], Server]
    broadcast: Callable[[RoundContext, Server], Broadcast]
    rounds: tuple[Round, ...]
    predict: Callable[[RoundContext, Server, Batch], Float[Array, "B C"]]
    init_client: Callable[[PRNGKeyArray, Server], ClientState] = _no_state
    begin_task: Callable[[RoundContext, Server, PRNGKeyArray], Server] = _same
    end_task: Callable[[RoundContext, Server, PRNGKeyArray], Server] = _same
    queries: bool = False
    predict_client: Callable[[RoundContext, Server, ClientState, Batch], Float[Array, "B C"]] | None = None
    trainable: Callable[[RoundContext, Server], dict[str, PyTree]] | None = None
    handover: Callable[[RoundContext, Server], PyTree] | None = None
    aggregation: str = "mean"
    predict_provisional: Callable[[RoundContext, Server, Batch], Float[Array, "B C"]] | None = None
    server_replay: ServerReplay | None = None
    predict_drawn: Callable[[RoundContext, Server, ClientState, Batch], Float[Array, "B C"]] | None = None
    restores: Callable[[RoundContext, Server, Array, PRNGKeyArray], Restored] | None = None
    personal: bool = False
