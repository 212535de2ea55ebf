"""A method from parts: a learner, what its clients add to their loss and report, and what the server does.

The only training step, optimiser and metrics of the package stand here. Parts are named tuples of pure
functions that close over options alone; `federate` puts them together to a `Method`, which the engine plays.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from fcljax.errors import InputError
from fcljax.federated.aggregation import Aggregation, AggregationOptions, make_aggregation
from fcljax.federated.rules import weighted_mean
from fcljax.models.heads import correct, cross_entropy
from fcljax.parts.learner import Adapter, Learner, Model, Objective, Output, hits, objective_loss
from fcljax.types import (
    Aggregate,
    Batch,
    Broadcast,
    ClientContext,
    Method,
    Metrics,
    Network,
    Phase,
    Program,
    ReplayBatch,
    ReplayBuffer,
    Restored,
    Round,
    RoundContext,
    ServerReplay,
    Sizes,
    Task,
    Upload,
    View,
    Weighted,
    When,
)

# ---- the parts ---------------------------------------------------------------------------------------------


class Train(NamedTuple):
    """How clients train: E epochs over their rows, with an optimiser that is new every round.

    optimiser: the direction of a step; the learning rate is applied to it afterwards
    factor(round, rounds, epoch) -> what the rates of an epoch of a round are multiplied with
    samples: draws of a Bayesian learner's parameters in every step; the loss is their mean
    """

    epochs: int
    batch_size: int
    lr: float
    optimiser: optax.GradientTransformation = optax.scale_by_adam()
    factor: Callable[[Array, int, Array], Array] | None = None
    samples: int = 1


class Seen(NamedTuple):
    """A step as terms and collects see it. `part` is what trains; `drawn` is what the output was computed
    with: the part itself, or parameters drawn from it where it is Bayesian."""

    context: ClientContext
    part: Model
    output: Output
    batch: Batch
    key: PRNGKeyArray
    drawn: Model


class Slots(NamedTuple):
    """Parameters that a term trains and sends besides the learner's, as those of an Adapter: `Model.extra`
    has them under the term's name."""

    init: Callable[[PRNGKeyArray], PyTree]
    part: Callable[[PyTree, Task], PyTree] = lambda params, task: params
    put: Callable[[PyTree, Task, PyTree], PyTree] = lambda params, task, part: part


Look = Callable[[Learner, Seen, PyTree], PyTree]  # from what was gathered so far to that and a batch


class Term(NamedTuple):
    """A client's extra loss with a memory of its own; every field but the name may be left out.

    loss(learner, seen, memory) -> scalar, added to the client's loss at every step
    init(key, part) -> what the client keeps from round to round
    open(ctx, state, key) -> memory, when a client starts
    look(learner, seen, memory) -> memory, in a pass under `view` after training
    keep(ctx, memory, part, state) -> state, when a client finishes
    at_end: are `look` and `keep` for the end of a task alone, when everybody with rows gets the model that
      the task ended with?
    limit(ctx, part) -> part, after every step
    recall(ctx, memory, key) -> places [recalls] in `rows(state)` [M] of past rows that join a batch; -1: none
    slots: parameters of its own
    reads: what it must find in the broadcast, by the name of the server step that sends it
    first: as `look`, in a pass under `view` before training
    again: as `look`, in a second pass under `view` after the first one
    report(ctx, memory, part) -> what goes up besides the part, gathered under the term's name
    closing: an `at_end` term that takes over this one's state in the pass at the end of a task
    """

    name: str
    loss: Callable[[Learner, Seen, PyTree], Array | float] | None = None
    init: Callable[[PRNGKeyArray, Model], PyTree] = lambda key, part: ()
    open: Callable[[ClientContext, PyTree, PRNGKeyArray], PyTree] = lambda context, state, key: ()
    look: Look | None = None
    keep: Callable[[ClientContext, PyTree, Model, PyTree], PyTree] = lambda context, memory, part, state: (
        state
    )
    limit: Callable[[ClientContext, Model], Model] | None = None
    recall: Callable[[ClientContext, PyTree, PRNGKeyArray], Int[Array, " recalls"]] | None = None
    rows: Callable[[PyTree], Int[Array, " M"]] | None = None
    recalls: int = 0
    view: View | None = None
    at_end: bool = False
    slots: Slots | None = None
    reads: tuple[str, ...] = ()
    first: Look | None = None
    again: Look | None = None
    report: Callable[[ClientContext, PyTree, Model], PyTree] | None = None
    closing: "Term | None" = None


class Collect(NamedTuple):
    """What a client reports besides its part, once it has trained.

    view: of the pass in which `look` sees the client's rows; None: at every step of training, before it
    init(ctx) -> what is summed up
    look(learner, seen, total) -> total
    close(ctx, total) -> what is sent
    channel: "gather", one per client; "sum", added up
    """

    name: str
    init: Callable[[ClientContext], PyTree]
    look: Look
    close: Callable[[ClientContext, PyTree], PyTree] = lambda context, total: total
    view: View | None = None
    channel: str = "gather"


class ServerStep(NamedTuple):
    """What the server does with the merged parameters.

    step(turn, learner, params, state, aggregate, key) -> (params, state, metrics): `aggregate.gather` and
      `aggregate.sum` hold what the collects report, by their names
    init(params, part) -> its state, from the first parameters and the first task's part of them
    sends(task, state) -> what goes down with the parameters, under its name; None: nothing
    collects: what clients must report
    hears: terms whose reports it reads, by their names
    takes: "adapter" or "classifier", parts that are gathered and not averaged: the step merges them
    sees_parts: do clients' parts reach the step one by one, as aggregate.gather["part"], besides their mean?
    follows_rule: does it merge what it gathers by the run's aggregation rule?
    changes: does it replace the merged parameters, so that the accuracy of those is worth reporting too?
    """

    name: str
    step: Callable[..., tuple[Model, PyTree, Metrics]]
    init: Callable[[Model, Model], PyTree] = lambda params, part: ()
    sends: Callable[[Task, PyTree], PyTree] | None = None
    collects: tuple[Collect, ...] = ()
    takes: tuple[str, ...] = ()
    hears: tuple[str, ...] = ()
    sees_parts: bool = False
    follows_rule: bool = False
    changes: bool = False

    @property
    def gathers(self) -> bool:
        """Does it read clients' reports one by one, or sums of them?"""
        return bool(self.collects or self.takes or self.hears or self.sees_parts)


class Survey(NamedTuple):
    """A round in which every client with rows reports and nobody trains."""

    step: ServerStep
    when: When
    batch_size: int


class Rehearse(NamedTuple):
    """Training of the server on rows that it keeps of every task, after all steps: of what travels, adapter
    and classifier, in the adapter's way of evaluation, by cross-entropy over the classes of the rows.

    step: name of the server step whose state holds the rows of the current task
    kept(turn, state) -> Kept: these
    plan(task, last) -> as of `types.Rehearsal`
    batch(turn, learner, state, batch) -> Batch, as the network's input
    train: how; `factor` is not read
    """

    step: str
    kept: Callable[[RoundContext, PyTree], ReplayBuffer]
    plan: Callable[[int, bool], tuple[tuple[int, int], ...]]
    batch: Callable[[RoundContext, Learner, PyTree, ReplayBatch], Batch]
    train: Train


class Payload(NamedTuple):
    """Down, every round: the part that trains, and what server steps send, by their names."""

    part: Model
    sent: dict[str, PyTree]


class ServerState(NamedTuple):
    """The global model, what each server step keeps, then each survey's, and the aggregation's own.

    provisional: the part as it was merged, before the steps, where one of them replaces it; () elsewhere
    """

    params: Model
    steps: tuple[PyTree, ...]
    merging: PyTree
    provisional: PyTree = ()


class Local(NamedTuple):
    """A client at work: parameters, optimiser, a memory per term, what is collected, by name, and how many
    steps it has taken."""

    part: Model
    optimiser: PyTree
    memory: tuple[PyTree, ...]
    collected: dict[str, PyTree]
    steps: Int[Array, ""]


Personal = Literal["classifier", "stats"]  # what of a Model clients can keep to themselves

_DRAWN = 1002  # what a step's key is folded in with for the draws of a Bayesian learner

MEAN = make_aggregation(AggregationOptions())
CROSS_ENTROPY = Objective()


class Run(NamedTuple):
    """What a run gives to a method besides the method's own options: sizes, the chosen adapter, how clients
    train and how uploads are merged, and terms that any method may carry."""

    sizes: Sizes
    network: Network
    adapter: Adapter
    train: Train
    aggregation: Aggregation = MEAN
    terms: tuple[Term, ...] = ()


# ---- the method --------------------------------------------------------------------------------------------


def federate(
    learner: Learner,
    sizes: Sizes,
    train: Train | None,
    terms: tuple[Term, ...] = (),
    steps: tuple[ServerStep, ...] = (),
    surveys: tuple[Survey, ...] = (),
    objective: Objective = CROSS_ENTROPY,
    aggregation: Aggregation = MEAN,
    predicts: str = "seen",
    rehearse: Rehearse | None = None,
    restores: Callable[[RoundContext, Model, Array, PRNGKeyArray], Restored] | None = None,
    personal: tuple[Personal, ...] = (),
    draws: int = 0,
) -> Method:
    """A method from its parts.

    Args:
      learner: network, adapter and classifier.
      setting: the stream's sizes.
      train: how clients train; None: they only take part in surveys.
      terms: added to the clients' loss, in this order.
      steps: what the server does after merging, in this order.
      surveys: rounds before or after a task's in which clients report.
      objective: the clients' own loss.
      aggregation: how uploads are merged.
      predicts: "seen", classes not seen yet never win; "all": they compete.
      rehearse: how the server trains on rows that it keeps; None: it does not.
      restores(turn, params, image, key) -> what the server could rebuild of images; None: nothing.
      personal: what of the model every client keeps to itself, that of all tasks: it is part of the client's
        state, never sent, and `Method.predict_client` reads it. The server's own stays at its first values.
        Terms find () in its place in the broadcast part.
      draws: of a Bayesian personal model's parameters in `Method.predict_drawn`; 0: there is none.

    Raises:
      InputError: for an aggregation rule that a step cannot follow, a term that reads what nobody sends, or a
        part that is both personal and merged by a step.
    """
    check_parts(terms, steps, surveys, aggregation)
    _check_personal(personal, steps)
    if terms and train is None:
        raise InputError(f"terms: {terms[0].name} acts on training, and nothing trains here; leave it out")
    parts = _Parts(learner, sizes, train, terms, steps, surveys, objective, aggregation, rehearse, personal)

    main = (Round(_program(parts, train), _server(parts)),) if train else ()
    return Method(
        init=lambda key, frozen: _init(parts, key, frozen),
        broadcast=lambda round_context, server: _broadcast(parts, round_context, server),
        rounds=main + _end_round(parts) + tuple(_survey_round(parts, i) for i in range(len(surveys))),
        init_client=lambda key, server: _init_client(parts, key, server),
        begin_task=lambda round_context, server, key: _begin_task(parts, round_context, server),
        queries=learner.queries,
        personal=bool(personal),
        trainable=lambda round_context, server: _trainable(parts, round_context, server),
        handover=lambda round_context, server: _handover(parts, round_context, server),
        aggregation=aggregation.name,
        server_replay=_rehearsal(parts, rehearse) if rehearse else None,
        restores=_restores(restores) if restores else None,
        **_predictions(parts, predicts, draws),
    )


def _restores(restores: Callable[..., Restored]) -> Callable[..., Restored]:
    def of_server(
        round_context: RoundContext, server: ServerState, image: Array, key: PRNGKeyArray
    ) -> Restored:
        return restores(round_context, server.params, image, key)

    return of_server


class _Parts(NamedTuple):
    """Everything static that the functions below close over."""

    learner: Learner
    sizes: Sizes
    train: Train | None
    terms: tuple[Term, ...]
    steps: tuple[ServerStep, ...]
    surveys: tuple[Survey, ...]
    objective: Objective
    aggregation: Aggregation
    rehearse: Rehearse | None
    personal: tuple[Personal, ...]

    @property
    def slots(self) -> dict[str, Slots]:
        """Of the terms that train something of their own, by their names."""
        return {term.name: term.slots for term in self.terms if term.slots}

    @property
    def taken(self) -> tuple[str, ...]:
        """Parts of the model that steps merge by themselves."""
        return tuple(name for step in self.steps for name in step.takes)

    @property
    def whole(self) -> bool:
        """Do parts travel as they are, since a step sees them one by one?"""
        return any(step.sees_parts for step in self.steps)

    @property
    def replaces(self) -> bool:
        """Does something replace what was merged?"""
        return self.rehearse is not None or any(step.changes for step in self.steps)

    @property
    def collects(self) -> tuple[Collect, ...]:
        """What clients report after training; steps that ask for the same name share it."""
        return tuple({each.name: each for step in self.steps for each in step.collects}.values())


def _predictions(parts: _Parts, predicts: str, draws: int) -> dict[str, Any]:
    """The functions of a Method that predict, by name; arguments as of `federate`."""
    learner = parts.learner

    def predict(
        round_context: RoundContext, server: ServerState, batch: Batch
    ) -> Float[Array, "batch classes"]:
        logits = learner.predict(round_context.frozen, server.params, batch, round_context.task)
        lowest = jnp.finfo(logits.dtype).min
        return logits if predicts == "all" else jnp.where(round_context.task.seen, logits, lowest)

    def predict_provisional(
        round_context: RoundContext, server: ServerState, batch: Batch
    ) -> Float[Array, "batch classes"]:
        merged = _put(parts, server.params, round_context.task, server.provisional)
        return predict(round_context, server._replace(params=merged), batch)

    def predict_client(round_context: RoundContext, server: ServerState, state: tuple, batch: Batch) -> Array:
        mine = server.params._replace(**_stays(parts, state))
        return predict(round_context, server._replace(params=mine), batch)

    def predict_drawn(round_context: RoundContext, server: ServerState, state: tuple, batch: Batch) -> Array:
        mine, sample = server.params._replace(**_stays(parts, state)), learner.sample
        assert sample is not None

        def probabilities(key: PRNGKeyArray) -> Array:
            drawn = server._replace(params=sample(key, mine))
            return jax.nn.softmax(predict(round_context, drawn, batch))

        keys = jax.random.split(jax.random.key(_DRAWN), draws)  # the same for all batches
        return jnp.log(jnp.mean(jax.lax.map(probabilities, keys), axis=0) + 1e-30)

    return {
        "predict": predict,
        "predict_client": predict_client if parts.personal else None,
        "predict_drawn": predict_drawn if draws else None,
        "predict_provisional": predict_provisional if parts.replaces else None,
    }


def check_parts(
    terms: tuple[Term, ...],
    steps: tuple[ServerStep, ...],
    surveys: tuple[Survey, ...],
    aggregation: Aggregation,
) -> None:
    """Check that the parts fit together.

    Raises:
      InputError: naming the part that does not, and why.
    """
    sent = {step.name for step in steps if step.sends}
    for term in terms:
        for name in term.reads:
            if name not in sent:
                raise InputError(f"terms: {term.name} reads {name!r}, which no server step sends")
        if (term.look or term.first or term.again) and term.view is None:
            raise InputError(f"terms: {term.name} looks at rows, but has no view of them")
        if term.recall and term.rows is None:
            raise InputError(f"terms: {term.name} recalls past rows, but does not say which there are")
    if sum(term.recall is not None for term in terms) > 1:
        raise InputError("terms: only one of them can recall past rows")
    names = [term.name for term in terms]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InputError(f"terms: two of them have the name {twice[0]!r}")
    plain = aggregation.pre is None and aggregation.reduce is None and aggregation.post is None
    for step in (*steps, *(survey.step for survey in surveys)):
        # clipping and server optimisers act on what is averaged, so not on what a step takes over
        partly = step.takes and (aggregation.post or (aggregation.pre and aggregation.name != "uniform"))
        # a step that merges none of the parts that it sees leaves the mean to the rule
        beside = step.sees_parts and not step.takes and aggregation.name == "uniform"
        follows = (step.follows_rule and not partly) or beside
        if step.gathers and not plain and (aggregation.noise or not follows):
            raise InputError(
                f"aggregator: {aggregation.name!r} cannot be honoured, because {step.name} merges what "
                f"clients send by a rule of its own; nearest: 'mean'"
            )


def _first_task(sizes: Sizes) -> Task:
    """The stream's first task, from which client states get their shapes."""
    ids = np.arange(sizes.classes, dtype=np.int32)
    mine = ids < sizes.task_classes
    return Task.of_numpy(np.int32(0), ids[: sizes.task_classes], mine, mine)


def _part(parts: _Parts, params: Model, task: Task) -> Model:
    """What trains and travels now, of the learner and of the terms."""
    extra = {name: slots.part(params.extra[name], task) for name, slots in parts.slots.items()}
    return parts.learner.part(params, task)._replace(extra=extra)


def _put(parts: _Parts, params: Model, task: Task, part: Model) -> Model:
    """The parameters with the merged part in its place; what a step takes over, or clients keep to
    themselves, stays as it was."""
    mine = _part(parts, params, task)
    part = part._replace(**{name: getattr(mine, name) for name in (*parts.taken, *parts.personal)})
    put = lambda name, slots: slots.put(params.extra[name], task, part.extra[name])
    extra = {name: put(name, slots) for name, slots in parts.slots.items()}
    return parts.learner.put(params, task, part)._replace(extra=extra)


def _averaged(parts: _Parts, part: Model) -> Model:
    """What of a part is merged coordinate by coordinate: all that is sent but what a step takes over."""
    nothing: dict[str, PyTree] = dict.fromkeys(parts.taken, ())
    return _sent(parts, part)._replace(**nothing)


def _sent(parts: _Parts, part: Model) -> Model:
    """A part without what clients keep to themselves."""
    nothing: dict[str, PyTree] = dict.fromkeys(parts.personal, ())
    return part._replace(**nothing)


def _stays(parts: _Parts, state: tuple) -> dict[Personal, PyTree]:
    """What a client keeps to itself of the model, by name: it lies behind the terms' states."""
    return state[-1] if parts.personal else {}


def _kept(parts: _Parts, task: Task, part: Model, state: tuple) -> tuple[dict[Personal, PyTree], ...]:
    """The same with a task's part in its place, as it lies there."""
    if not parts.personal:
        return ()
    kept = {name: getattr(part, name) for name in parts.personal}
    if "classifier" in kept:
        put = parts.learner.classifier.put
        kept["classifier"] = put(_stays(parts, state)["classifier"], task, kept["classifier"])
    return (kept,)


def _check_personal(personal: tuple[Personal, ...], steps: tuple[ServerStep, ...]) -> None:
    for step in steps:
        both = sorted({*step.takes} & {*personal})
        if both or (personal and step.sees_parts):
            raise InputError(f"personal: {(both or personal)[0]} is not sent, and {step.name} needs it")


def _init(parts: _Parts, key: PRNGKeyArray, frozen: PyTree) -> ServerState:
    params = parts.learner.init(key, frozen)
    keys = {term.name: jax.random.fold_in(key, 1000 + i) for i, term in enumerate(parts.terms)}
    params = params._replace(extra={name: slots.init(keys[name]) for name, slots in parts.slots.items()})
    part = _part(parts, params, _first_task(parts.sizes))
    steps = (*parts.steps, *(survey.step for survey in parts.surveys))
    own = tuple(step.init(params, part) for step in steps)
    provisional = part if parts.replaces else ()
    return ServerState(params, own, parts.aggregation.init(_averaged(parts, part)), provisional)


def _init_client(parts: _Parts, key: PRNGKeyArray, server: ServerState) -> tuple[PyTree, ...]:
    part = _part(parts, server.params, _first_task(parts.sizes))
    kept = {name: getattr(server.params, name) for name in parts.personal}
    return (*(term.init(key, part) for term in parts.terms), *([kept] if kept else ()))


def _begin_task(parts: _Parts, round_context: RoundContext, server: ServerState) -> ServerState:
    """Adapters open a task; a server optimiser starts anew, since other parameters train now."""
    params = parts.learner.open_task(server.params, round_context.task)
    part = _part(parts, params, round_context.task)
    return server._replace(params=params, merging=parts.aggregation.init(_averaged(parts, part)))


def _broadcast(parts: _Parts, round_context: RoundContext, server: ServerState) -> Broadcast:
    """Down: the part of the task and what steps send. Clients hold what came before."""
    kept = zip(parts.steps, server.steps[: len(parts.steps)], strict=True)
    sent = {step.name: step.sends(round_context.task, state) for step, state in kept if step.sends}
    part = _sent(parts, _part(parts, server.params, round_context.task))
    return Broadcast(Payload(part, sent), parts.learner.cached(server.params))


def _trainable(parts: _Parts, round_context: RoundContext, server: ServerState) -> dict[str, PyTree]:
    if parts.train is None:
        return {}
    part = _part(parts, server.params, round_context.task)
    adapter = parts.learner.adapter.trained(part.adapter, round_context.task)
    return {"adapter": adapter, "classifier": part.classifier, **part.extra}


def _handover(parts: _Parts, round_context: RoundContext, server: ServerState) -> dict[str, PyTree]:
    """Of a task's part what clients go on to hold: the leaves by whose names they hold something."""
    named = lambda tree: {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(tree)}
    cached, part = (
        parts.learner.cached(server.params),
        _sent(parts, _part(parts, server.params, round_context.task)),
    )
    return {name: leaf for name, leaf in named(part).items() if name in named(cached)}


# ---- the client --------------------------------------------------------------------------------------------


def _program(parts: _Parts, train: Train) -> Program:
    """What participants do in a round: train, look again, send."""
    terms, learner = parts.terms, parts.learner

    def start(context: ClientContext, state: tuple, key: PRNGKeyArray) -> Local:
        part, collected = (
            _whole_part(parts, context, state),
            {c.name: c.init(context) for c in parts.collects},
        )
        memory = _open(terms, context, state, key)
        return Local(part, train.optimiser.init(part), memory, collected, jnp.int32(0))

    def finish(context: ClientContext, local: Local, state: tuple) -> tuple[Upload, tuple]:
        sent = {c.name: c.close(context, local.collected[c.name]) for c in parts.collects}
        kept = _keep(terms, context, local, state, at_end=False)
        pairs = zip(terms, local.memory, strict=True)
        sent |= {own.name: own.report(context, memory, local.part) for own, memory in pairs if own.report}
        up = learner.sends(local.part, context.task) if learner.sends else local.part
        return _upload(parts, context, up, sent), (*kept, *_kept(parts, context.task, local.part, state))

    recall, memory, recalls = _recall(terms)
    view = View(train.epochs, train.batch_size, recall=recalls)
    main = Phase(view, functools.partial(train_step, parts, train), recall)
    after = _look_phases(parts, parts.collects, at_end=False)
    passes = (*_term_phases(parts, "first"), main, *after, *_term_phases(parts, "again"))
    return Program(start, passes, finish, _receive(parts), memory)


def _whole_part(parts: _Parts, context: ClientContext, state: tuple) -> Model:
    """What was broadcast, with what trains now of what the client keeps to itself."""
    stays = dict(_stays(parts, state))
    if "classifier" in stays:
        stays["classifier"] = parts.learner.classifier.part(stays["classifier"], context.task)
    return context.payload.part._replace(**stays)


def _open(
    terms: tuple[Term, ...], context: ClientContext, state: tuple, key: PRNGKeyArray
) -> tuple[PyTree, ...]:
    """The terms' memories, when a client starts; their states are the first of `state`."""
    keys = [key if i == 0 else jax.random.fold_in(key, i) for i in range(len(terms))]
    own = state[: len(terms)]
    return tuple(term.open(context, each, key) for term, each, key in zip(terms, own, keys, strict=True))


def _keep(
    terms: tuple[Term, ...], context: ClientContext, local: Local, state: tuple, at_end: bool
) -> tuple[PyTree, ...]:
    """What a client keeps of terms that keep something now; the others' state stays."""
    keep = lambda term, memory, own: (
        term.keep(context, memory, local.part, own) if term.at_end == at_end else own
    )
    return tuple(map(keep, terms, local.memory, state[: len(terms)]))


def _end_round(parts: _Parts) -> tuple[Round, ...]:
    """After a task's last round: terms look at its rows under the model that it ended with. Nothing goes
    up."""
    terms = tuple(term.closing or term for term in parts.terms)
    if not any(term.at_end for term in terms):
        return ()
    parts = parts._replace(terms=terms)

    def start(context: ClientContext, state: tuple, key: PRNGKeyArray) -> Local:
        memory = _open(terms, context, state, key)
        return Local(_whole_part(parts, context, state), (), memory, {}, jnp.int32(0))

    def finish(context: ClientContext, local: Local, state: tuple) -> tuple[Upload, tuple]:
        kept = _keep(terms, context, local, state, at_end=True)
        return Upload(weight=context.client.examples), (*kept, *_kept(parts, context.task, local.part, state))

    program = Program(start, _look_phases(parts, (), at_end=True), finish)
    return (Round(program, None, "everyone", "closing"),)


def _recall(terms: tuple[Term, ...]) -> tuple[Callable | None, Callable | None, int]:
    """Of the one term that recalls past rows: a phase's `recall`, the program's `memory`, and how many."""
    found = [(i, own.recall, own.rows, own.recalls) for i, own in enumerate(terms) if own.recall and own.rows]
    if not found:
        return None, None, 0
    place, recall, rows, recalls = found[0]
    choose = lambda context, local, key: recall(context, local.memory[place], key)
    return choose, lambda state: rows(state[place]), recalls


def train_step(
    parts: _Parts, train: Train, context: ClientContext, local: Local, batch: Batch, key: PRNGKeyArray
) -> tuple[Local, Metrics]:
    """The one training step: the objective, the adapter's own loss and all terms; a step of the optimiser."""
    learner, objective = parts.learner, parts.objective
    loss_of = functools.partial(_loss, parts, train, context, local.memory, batch, key)
    (loss, output), gradient = jax.value_and_grad(loss_of, has_aux=True)(local.part)
    direction, optimiser = train.optimiser.update(gradient, local.optimiser, local.part)
    part = _descend(parts, train, context, local.part, direction, local.steps)._replace(stats=output.stats)
    seen = Seen(context, local.part, output, batch, key, local.part)
    during = {c.name: c.look(learner, seen, local.collected[c.name]) for c in parts.collects if not c.view}
    rows = jnp.sum(batch.mask).astype(jnp.float32)
    total = loss if objective.reduction == "sum" else loss * rows
    right = hits(objective, output, batch, context.task)
    metrics = {"loss": Weighted(total, rows), "train_accuracy": Weighted(right, rows)}
    return Local(part, optimiser, local.memory, local.collected | during, local.steps + 1), metrics


def _loss(
    parts: _Parts,
    train: Train,
    context: ClientContext,
    memory: tuple[PyTree, ...],
    batch: Batch,
    key: PRNGKeyArray,
    part: Model,
) -> tuple[Array, Output]:
    """The loss of a part on a batch, and the output; the means over draws if the learner is Bayesian."""
    learner, own = parts.learner, parts.learner.adapter.loss

    def of(drawn: Model) -> tuple[Array, Output]:
        output = learner.forward(context.frozen, context.cached, drawn, batch, context.task, True)
        loss = objective_loss(parts.objective, output, batch, context.task)
        if own is not None:
            loss = loss + own(drawn.adapter, output.query, context.task, batch.mask)
        for term, mine in zip(parts.terms, memory, strict=True):
            if term.loss:
                loss = loss + term.loss(learner, Seen(context, part, output, batch, key, drawn), mine)
        return loss, output

    if learner.sample is None:
        return of(part)
    # a draw of the step's first row, where rows have some: whoever holds the rows gets the same parameters
    own_draw = key if batch.keys is None else batch.keys[0]
    keys = jax.random.split(jax.random.fold_in(own_draw, _DRAWN), train.samples)
    if train.samples == 1:
        return of(learner.sample(keys[0], part))
    # one after the other: side by side, every convolution would have kernels of its own for each draw
    found = jax.lax.map(lambda key: of(learner.sample(key, part)), keys)
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), found)


def _descend(
    parts: _Parts, train: Train, context: ClientContext, part: Model, direction: PyTree, steps: Int[Array, ""]
) -> Model:
    """part - rate * direction, with the adapter's own rate if it has one, under the terms' limits."""
    rate = parts.learner.adapter.rate
    epoch = steps // jnp.maximum(-(-context.client.examples // train.batch_size), 1)
    factor = train.factor(context.client.round, parts.sizes.rounds, epoch) if train.factor else 1.0
    rates = (train.lr if rate is None else rate, train.lr, train.lr)
    move = lambda own, by, rate: jax.tree.map(lambda x, u: x - rate * factor * u, own, by)
    part = Model(*map(move, part[:3], direction[:3], rates), stats=part.stats)
    for term in parts.terms:
        part = term.limit(context, part) if term.limit else part
    return part


def _look_phases(parts: _Parts, collects: tuple[Collect, ...], at_end: bool) -> tuple[Phase, ...]:
    """Passes after training, one for all terms and collects that look at rows in the same way."""
    now = [(i, term) for i, term in enumerate(parts.terms) if term.at_end == at_end]
    looks = [(term.view, i, term.look) for i, term in now if term.view and term.look]
    return _passes(parts, looks, collects)


def _term_phases(parts: _Parts, when: Literal["first", "again"]) -> tuple[Phase, ...]:
    """Passes of terms alone: before training, or after those that all look at."""
    looks = [(term.view, i, getattr(term, when)) for i, term in enumerate(parts.terms)]
    return _passes(parts, [each for each in looks if each[0] and each[2]], ())


def _passes(parts: _Parts, looks: list, collects: tuple[Collect, ...]) -> tuple[Phase, ...]:
    """A pass for each view: of terms, as (view, place, what they do), and of collects."""
    reports = [(c.view, c) for c in collects if c.view]
    views = dict.fromkeys([view for view, _, _ in looks] + [view for view, _ in reports])

    def phase(view: View) -> Phase:
        terms = {i: look for own, i, look in looks if own == view}
        mine = [c for own, c in reports if own == view]
        return Phase(view, functools.partial(_look, parts, terms, mine))

    return tuple(map(phase, views))


def _look(
    parts: _Parts,
    terms: dict[int, Look],
    collects: list[Collect],
    context: ClientContext,
    local: Local,
    batch: Batch,
    key: PRNGKeyArray,
) -> tuple[Local, Metrics]:
    """One step of a pass after training: what these terms, by place, and these collects make of a batch."""
    learner = parts.learner
    output = learner.forward(context.frozen, context.cached, local.part, batch, context.task, True)
    seen = Seen(context, local.part, output, batch, key, local.part)
    memory = tuple(terms[i](learner, seen, own) if i in terms else own for i, own in enumerate(local.memory))
    more = {c.name: c.look(learner, seen, local.collected[c.name]) for c in collects}
    return local._replace(memory=memory, collected=local.collected | more), {}


def _upload(parts: _Parts, context: ClientContext, part: Model, sent: dict[str, PyTree]) -> Upload:
    """Up: the part, as a whole or divided into what is averaged and what is gathered, and the reports."""
    channel = lambda name: {c.name: sent[c.name] for c in parts.collects if c.channel == name}
    reports = {term.name: sent[term.name] for term in parts.terms if term.report}
    gather, rows = channel("gather") | reports, context.client.examples
    if parts.whole:
        return Upload((), channel("sum"), gather | {"part": part}, rows)
    mean = _averaged(parts, part)
    gather |= {name: getattr(part, name) for name in parts.taken}
    if parts.aggregation.reduce:  # the rule needs all of them at once
        gather["mean"], mean = mean, ()
    return Upload(mean, channel("sum"), gather, rows)


def _receive(parts: _Parts) -> Callable[[ClientContext, Upload], Upload] | None:
    """What the aggregation does to one upload as it arrives; None: nothing."""
    pre = parts.aggregation.pre
    if pre is None:
        return None

    def receive(context: ClientContext, upload: Upload) -> Upload:
        reference, weight = _averaged(parts, context.payload.part), jnp.asarray(upload.weight, jnp.float32)
        if parts.whole:
            mine = upload.gather["part"]
            merged, weight = pre(_averaged(parts, mine), reference, weight)
            taken = {name: getattr(mine, name) for name in parts.taken}
            gather = upload.gather | {"part": merged._replace(**taken)}
            return upload._replace(gather=gather, weight=weight)
        gathered = parts.aggregation.reduce is not None
        mean, weight = pre(upload.gather["mean"] if gathered else upload.mean, reference, weight)
        if gathered:
            return upload._replace(gather=upload.gather | {"mean": mean}, weight=weight)
        return upload._replace(mean=mean, weight=weight)

    return receive


# ---- the server --------------------------------------------------------------------------------------------


def _server(parts: _Parts) -> Callable[..., tuple[ServerState, Metrics]]:
    """Merge, put the part in its place, then the steps in their order."""

    def server(round_context: RoundContext, state: ServerState, aggregate: Aggregate, key: PRNGKeyArray):
        aggregate = _unpacked(parts, aggregate)
        mean, merging = _merge(parts, round_context, state, aggregate, key)
        params, own, metrics = _put(parts, state.params, round_context.task, mean), list(state.steps), {}
        provisional = _part(parts, params, round_context.task) if parts.replaces else ()
        for i, step in enumerate(parts.steps):
            step_key = key if i == 0 else jax.random.fold_in(key, i)
            params, own[i], more = step.step(
                round_context, parts.learner, params, own[i], aggregate, step_key
            )
            metrics |= {f"{step.name}_{name}": value for name, value in more.items()}
        return ServerState(params, tuple(own), merging, provisional), metrics

    return server


def _unpacked(parts: _Parts, aggregate: Aggregate) -> Aggregate:
    """What arrived, with parts that travelled as a whole under the names of what they are made of."""
    if not parts.whole:
        return aggregate
    part = aggregate.gather["part"]
    more = {name: getattr(part, name) for name in parts.taken} | {"mean": _averaged(parts, part)}
    return aggregate._replace(gather=aggregate.gather | more)


def _merge(
    parts: _Parts, round_context: RoundContext, state: ServerState, aggregate: Aggregate, key: PRNGKeyArray
) -> tuple[Model, PyTree]:
    """The clients' parts as one, under the aggregation rule."""
    rule, valid = parts.aggregation, aggregate.valid
    reference, mean = _averaged(parts, round_context.previous.payload.part), aggregate.mean
    if rule.reduce:
        stacked = aggregate.gather["mean"]
        mean = rule.reduce(stacked, reference, aggregate.weight, valid, jax.random.fold_in(key, 1000))
    elif parts.whole:
        mean = weighted_mean(aggregate.gather["mean"], aggregate.weight, valid)
    if rule.post is None:
        return mean, state.merging
    return rule.post(mean, reference, state.merging, jnp.sum(valid), jax.random.fold_in(key, 1001))


def _rehearsal(parts: _Parts, rehearse: Rehearse) -> ServerReplay:
    """Steps of the server's own optimiser on the part that travels; what terms train stays."""
    learner, train, optimiser = parts.learner, rehearse.train, rehearse.train.optimiser
    place = [step.name for step in parts.steps].index(rehearse.step)

    def start(round_context: RoundContext, server: ServerState) -> tuple[Model, PyTree]:
        part = learner.part(server.params, round_context.task)
        return part, optimiser.init(part)

    def step(
        round_context: RoundContext, server: ServerState, local: tuple, rows: ReplayBatch, key: PRNGKeyArray
    ):
        del key
        part, state = local
        batch = rehearse.batch(round_context, learner, server.steps[place], rows)

        def loss_of(part: Model):  # a server has all parameters, of which clients hold some
            logits = learner.forward(
                round_context.frozen, server.params, part, batch, round_context.task, False
            ).logits
            return cross_entropy(logits, batch.label, rows.classes, batch.mask), logits

        (loss, logits), gradient = jax.value_and_grad(loss_of, has_aux=True)(part)
        direction, state = optimiser.update(gradient, state, part)
        part = jax.tree.map(lambda x, by: x - train.lr * by, part, direction)
        count = jnp.sum(batch.mask).astype(jnp.float32)
        right = correct(logits, batch.label, rows.classes, batch.mask)
        return (part, state), {"loss": Weighted(loss * count, count), "accuracy": Weighted(right, count)}

    def finish(round_context: RoundContext, server: ServerState, local: tuple) -> ServerState:
        return server._replace(params=learner.put(server.params, round_context.task, local[0]))

    kept = lambda round_context, server: rehearse.kept(round_context, server.steps[place])
    return ServerReplay(kept, rehearse.plan, train.epochs, train.batch_size, start, step, finish)


def _survey_round(parts: _Parts, index: int) -> Round:
    """A round of reports: every client with rows looks at them under the current model."""
    survey = parts.surveys[index]
    collects, place = survey.step.collects, len(parts.steps) + index
    views = dict.fromkeys(c.view or View(1, survey.batch_size, False, False) for c in collects)

    def start(context: ClientContext, state: tuple, key: PRNGKeyArray) -> Local:
        del key
        collected = {c.name: c.init(context) for c in collects}
        memory = ((),) * len(parts.terms)
        return Local(_whole_part(parts, context, state), (), memory, collected, jnp.int32(0))

    def phase(view: View) -> Phase:
        mine = [c for c in collects if (c.view or View(1, survey.batch_size, False, False)) == view]
        return Phase(view, functools.partial(_look, parts, {}, mine))

    def finish(context: ClientContext, local: Local, state: tuple) -> tuple[Upload, tuple]:
        sent = {c.name: c.close(context, local.collected[c.name]) for c in collects}
        channel = lambda name: {c.name: sent[c.name] for c in collects if c.channel == name}
        return Upload(sum=channel("sum"), gather=channel("gather"), weight=context.client.examples), state

    def server(round_context: RoundContext, state: ServerState, aggregate: Aggregate, key: PRNGKeyArray):
        own = state.steps[place]
        params, own, metrics = survey.step.step(
            round_context, parts.learner, state.params, own, aggregate, key
        )
        steps = (*state.steps[:place], own, *state.steps[place + 1 :])
        named = {f"{survey.step.name}_{name}": value for name, value in metrics.items()}
        return state._replace(params=params, steps=steps), named

    program = Program(start, tuple(map(phase, views)), finish)
    return Round(program, server, who="everyone", when=survey.when)
