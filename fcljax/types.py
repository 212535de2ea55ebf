"""The protocol between methods and the engine: named tuples of arrays and of pure functions, no maths.

A method is a `Method`: pure functions over its own pytrees (server state, client state, local training state,
upload). Shapes are fixed for a whole run: C classes, T tasks, K clients, B rows a batch. A task is data (an
index and masks), never a Python int inside jit, so one trace of each function serves all rounds of all tasks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

PyTree = Any
Frozen = PyTree  # parameters of the backbone: an argument everywhere, shared by all clients, never trained
Server = PyTree  # everything the server keeps between rounds
ClientState = PyTree  # everything one client keeps between rounds; () for stateless clients
Local = PyTree  # what a client holds while it works: parameters, optimiser state, running statistics
Metrics = dict[str, "Weighted"]


class Weighted(NamedTuple):
    """A metric that adds up: sums over workers and batches of value * weight, and of weight. Its mean is
    total / weight."""

    total: Float[Array, ""]
    weight: Float[Array, ""]


class Setting(NamedTuple):
    """The static sizes of a run, from which methods make their shapes."""

    classes: int  # C
    tasks: int  # T
    task_classes: int  # Ct: classes of the largest task
    clients: int  # K
    rounds: int = 1  # per task, for schedules that run over a task's rounds


class Backbone(NamedTuple):
    """A frozen feature extractor as methods see it: encode(frozen, image [B, ...], injection or None) ->
    class token [B, width]."""

    encode: Callable[[Frozen, Array, Any], Array]
    width: int
    blocks: int
    image: tuple[int, ...] = ()  # shape of one image, for methods that keep some


class Task(NamedTuple):
    """One task as data. Classes are numbered by their position in the shuffled class order, so a task owns a
    contiguous range."""

    index: Int[Array, ""]
    classes: Int[Array, " Ct"]  # the task's class ids; -1 pads tasks smaller than the largest one
    current: Bool[Array, " C"]  # classes of this task
    seen: Bool[Array, " C"]  # classes of this task and all before it


class ClientInfo(NamedTuple):
    """What is known of one client in one round: its id, its number of rows (in all and per class), and the
    round in the task."""

    id: Int[Array, ""]
    rows: Int[Array, ""]
    class_rows: Int[Array, " C"]
    round: Int[Array, ""]


class Batch(NamedTuple):
    """B rows of one client. Rows with mask False are padding: zero images, label 0, row -1."""

    image: Float[Array, "B H W 3"]
    label: Int[Array, " B"]
    mask: Bool[Array, " B"]
    row: Int[Array, " B"]
    query: Float[Array, "B D"] | None = (
        None  # cached features of the un-prompted backbone, where the input is deterministic
    )


class Broadcast(NamedTuple):
    """What a client works from. `wire` crosses the network every round and is counted as download; `held` is
    what every client already has from earlier rounds (frozen prompts of past tasks, say) and is counted as
    extra storage."""

    wire: PyTree
    held: PyTree = ()


class Upload(NamedTuple):
    """What one client sends. `mean` leaves are averaged with `weight` (or by a robust rule), `sum` leaves are
    added; both can be streamed. `gather` leaves reach the server one per client."""

    mean: PyTree = ()
    sum: PyTree = ()
    gather: PyTree = ()
    weight: Float[Array, ""] | float = 1.0


class Aggregate(NamedTuple):
    """What the server sees after a round. Absent, dropped and non-finite clients have valid False and weight
    0 and are in no sum.

    Rows of `gather`, `weight`, `id` and `valid` are the round's participants in the order of their ids,
    padded to K.
    """

    mean: PyTree
    sum: PyTree
    gather: PyTree
    weight: Float[Array, " K"]
    id: Int[Array, " K"]
    valid: Bool[Array, " K"]


class View(NamedTuple):
    """How a phase reads a client's rows: static. `augment` asks the data layer for the training view, else
    the clean one."""

    epochs: int
    batch_size: int
    shuffle: bool = True
    augment: bool = True


class Phase(NamedTuple):
    """One pass, or E passes, over a client's own rows.

    step(frozen, broadcast, local, batch, task, key) -> (local, metrics)
    """

    view: View
    step: Callable[[Frozen, Broadcast, Local, Batch, Task, PRNGKeyArray], tuple[Local, Metrics]]


class Program(NamedTuple):
    """Everything a client does when it is called.

    start(broadcast, state, task, info, key) -> local
    finish(broadcast, local, state, task, info) -> (upload, state)
    """

    start: Callable[[Broadcast, ClientState, Task, ClientInfo, PRNGKeyArray], Local]
    phases: tuple[Phase, ...]
    finish: Callable[[Broadcast, Local, ClientState, Task, ClientInfo], tuple[Upload, ClientState]]


class Extra(NamedTuple):
    """A round besides those of the task, in which every client with rows takes part: class means for a new
    classifier, say. Same signatures as Method.client and Method.server."""

    client: Program
    server: Callable[[Frozen, Server, Aggregate, Task, PRNGKeyArray], tuple[Server, Metrics]]


def _no_state(key: PRNGKeyArray, server: Server) -> ClientState:
    del key, server
    return ()


def _same_at_begin(server: Server, task: Task, key: PRNGKeyArray) -> Server:
    del task, key
    return server


def _same_at_end(frozen: Frozen, server: Server, task: Task, key: PRNGKeyArray) -> Server:
    del frozen, task, key
    return server


class Method(NamedTuple):
    """A federated continual learning method: pure functions, all of them traced once for a whole run.

    init(key, frozen) -> server
    broadcast(server, task) -> Broadcast: exactly what clients get
    client: the program of the participants of a round
    server(frozen, server, aggregate, task, key) -> (server, metrics)
    predict(frozen, server, image, query, task) -> logits [B, C], the lowest finite value for classes not seen
    yet init_client(key, server) -> state of one client before it ever takes part
    begin_task(server, task, key) -> server, before the first round of a task
    end_task(frozen, server, task, key) -> server, after the last round of a task
    queries: do steps and predict read the frozen backbone's own class token of an image? It is cached
      wherever the image is deterministic
    opening, closing: an extra round before the first and after the last round of a task
    refresh: a program that every client runs after aggregation, taking part or not; its upload is ignored
    predict_client(frozen, server, state, image, query, task) -> logits of a client's personal model
    trainable(server, task) -> named parts of what a client trains, for counting only
    """

    init: Callable[[PRNGKeyArray, Frozen], Server]
    broadcast: Callable[[Server, Task], Broadcast]
    client: Program
    server: Callable[[Frozen, Server, Aggregate, Task, PRNGKeyArray], tuple[Server, Metrics]]
    predict: Callable[[Frozen, Server, Array, Array | None, Task], Array]
    init_client: Callable[[PRNGKeyArray, Server], ClientState] = _no_state
    begin_task: Callable[[Server, Task, PRNGKeyArray], Server] = _same_at_begin
    end_task: Callable[[Frozen, Server, Task, PRNGKeyArray], Server] = _same_at_end
    queries: bool = False
    opening: Extra | None = None
    closing: Extra | None = None
    refresh: Program | None = None
    predict_client: Callable[[Frozen, Server, ClientState, Array, Array | None, Task], Array] | None = None
    trainable: Callable[[Server, Task], dict[str, PyTree]] | None = None
