"""A method from its parts: `federate` turns a learner, client rules and server rules into
a `Method`.

    clients   train the payload on their loss and their rules, and send it with their reports
    server    merges the uploads by the run's aggregation rule, then applies the server
              rules in their order

Methods that do not fit these parts can implement `types.Method` directly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fcljax.errors import InputError
from fcljax.federated.aggregation import Aggregation, AggregationOptions, make_aggregation
from fcljax.federated.keys import InitKey, ServerKey, StepKey
from fcljax.federated.rules import weighted_mean
from fcljax.federated.schedule import phase_examples
from fcljax.parts import client
from fcljax.parts.checked import checked_client_rule, checked_server_rule
from fcljax.parts.classifiers import linear_on
from fcljax.parts.client import ClientEnd, ClientRule, ClientWork, Local, Report, Training
from fcljax.parts.learner import (
    Adapter,
    Classifier,
    Keys,
    Learner,
    Loss,
    Params,
    Reads,
    check_all_last,
    learner,
    two_keys,
)
from fcljax.parts.server import (
    ServerRound,
    ServerRule,
    check_aggregation,
    merged_by_rules,
    reports_of,
    sees_each_client,
)
from fcljax.parts.user_code import check_arguments
from fcljax.types import (
    Aggregate,
    Batch,
    Broadcast,
    ChooseReplay,
    Claim,
    ClientContext,
    Method,
    Metrics,
    Network,
    Phase,
    Program,
    ReceiveUpload,
    Round,
    RoundContext,
    ServerReplay,
    Sizes,
    Task,
    Upload,
    View,
)

MEAN = make_aggregation(AggregationOptions())
# a rule for any method cannot know the learner, which the method composes
MakeServerRule = Callable[[Learner], ServerRule]
Personal = Literal["adapter", "classifier", "stats"]


class Run(NamedTuple):
    """The inputs of a method besides its own options."""

    sizes: Sizes
    """Numbers of classes, tasks, clients and rounds."""
    network: Network
    """The frozen network."""
    adapter: Adapter
    """The adapter that the user chose."""
    training: Training
    """How clients train."""
    aggregation: Aggregation = MEAN
    """How uploads are merged."""
    rules: tuple[ClientRule, ...] = ()
    """Client rules that the user may add to any method, such as FedProx's."""
    server_rules: tuple[MakeServerRule, ...] = ()
    """Makers of server rules that the user may add to any method, such as HeadTune's."""


class Payload(NamedTuple):
    """The server's broadcast in every round."""

    trainable: Params
    """The trainable parameters of the task."""
    sent: dict[str, PyTree]
    """Values that server rules send, by the rule's name."""


class ServerState(NamedTuple):
    """The server's state between rounds."""

    params: Params
    """The global model: parameters of all tasks."""
    rules: tuple[PyTree, ...]
    """The states of server rules: first those of every round, then those of once per task."""
    aggregation: PyTree
    """The state of the aggregation rule, such as a server optimiser's."""
    provisional: PyTree = ()
    """The merged trainable parameters, if the server trains them further."""


def federate(
    run: Run,
    learner: Learner,
    *,
    loss: Loss | None = None,
    client_rules: tuple[ClientRule, ...] = (),
    server_rules: tuple[ServerRule, ...] = (),
    predicts: Literal["seen", "all"] = "seen",
    personal: tuple[Personal, ...] = (),
    server_replay: ServerReplay | None = None,
) -> Method:
    """Make a method from its parts.

    Args:
      run: sizes, training, aggregation and common client rules, as the user chose them.
      learner: network, adapter and classifier.
      loss: of the clients' training; None: clients only report.
      client_rules: further steps of clients, in this order; the run's own rules follow.
      server_rules: steps of the server after merging, in this order.
      predicts: "seen": unseen classes never win; "all": they compete.
      personal: parameters that stay in each client's state, for all tasks. The payload
        has () in their place, and clients are evaluated with their own models.
      server_replay: training of the server on stored examples; its functions act on
        `ServerState`.

    Raises:
      InputError: for parts that do not fit together, naming them.
    """
    # wrapped in checks here, so that nothing below checks what rules return. The method's
    # rules come first: their states keep their places whatever rules the user adds
    rules = tuple(map(checked_client_rule, (*client_rules, *run.rules)))
    server_rules += tuple(make_rule(learner) for make_rule in run.server_rules)
    server_rules = tuple(map(checked_server_rule, server_rules))
    check_arguments("federate", loss=(loss.value if loss else None, 3))
    _check_rules(run, loss, rules, server_rules, personal)
    parts = _Parts(
        run,
        learner,
        # without a loss there is no training phase
        run.training._replace(loss=loss),
        rules,
        each_round=tuple(rule for rule in server_rules if rule.when == "round"),
        # each of these has a round of its own, at a task's start or end
        per_task=tuple(rule for rule in server_rules if rule.when != "round"),
        personal=personal,
        server_replay=server_replay,
    )
    return Method(
        init=functools.partial(_init, parts),
        broadcast=functools.partial(_broadcast, parts),
        rounds=_rounds(parts),
        init_client=functools.partial(_init_client, parts),
        begin_task=functools.partial(_begin_task, parts),
        queries=learner.queries,
        batchwise=learner.adapter.batchwise,
        names_classes=learner.names_classes,
        personal=bool(personal),
        trainable=functools.partial(_counted, parts),
        handover=functools.partial(_handover, parts),
        aggregation=run.aggregation.name,
        server_replay=server_replay,
        **_predictions(parts, predicts),
    )


def learner_of(method: Method) -> Learner | None:
    """Return the learner of a method that `federate` made; None for other methods."""
    parts = _parts_of(method)
    if parts is None:
        return None
    return parts.learner


def _parts_of(method: Method) -> _Parts | None:
    # `federate` binds the parts as the first argument of `functools.partial`
    parts = next(iter(getattr(method.init, "args", ())), None)
    if isinstance(parts, _Parts):
        return parts
    return None


def rule_names(method: Method) -> dict[str, tuple[str, ...]]:
    """Return the names of server and client rules in the order of their states.

    It is empty for a method that `federate` did not make.
    """
    parts = _parts_of(method)
    if parts is None:
        return {}
    return {
        "server": tuple(rule.name for rule in (*parts.each_round, *parts.per_task)),
        "clients": tuple(rule.name for rule in parts.rules),
    }


class _Parts(NamedTuple):
    """The static parts of a method."""

    run: Run
    learner: Learner
    training: Training
    rules: tuple[ClientRule, ...]
    each_round: tuple[ServerRule, ...]
    per_task: tuple[ServerRule, ...]
    personal: tuple[Personal, ...]
    server_replay: ServerReplay | None

    @property
    def merged_by_rules(self) -> tuple[str, ...]:
        """Return the names of the parameters that server rules merge, not the aggregation rule."""
        return merged_by_rules(self.each_round)

    @property
    def reads_each_client(self) -> bool:
        """Return whether a server rule reads the trainable parameters of each client."""
        return sees_each_client(self.each_round)

    @property
    def server_trains(self) -> bool:
        """Return whether the server trains the merged model, so that both are evaluated."""
        return self.server_replay is not None or self.reads_each_client

    def work(self, rules: tuple[ClientRule, ...], reports: tuple[Report, ...]) -> ClientWork:
        """Return the static side of clients' work."""
        return ClientWork(self.learner, self.training, rules, reports)


def _check_rules(
    run: Run,
    loss: Loss | None,
    rules: tuple[ClientRule, ...],
    server_rules: tuple[ServerRule, ...],
    personal: tuple[Personal, ...],
) -> None:
    if rules and loss is None:
        raise InputError(
            f"client_rules: {rules[0].name} acts on training, but nothing trains here; leave it out"
        )
    if run.server_rules and "classifier" in personal:
        raise InputError(
            f"{server_rules[-1].name}: it sets the server's classifier, and each client has one of its own; "
            "leave it out"
        )
    names = [rule.name for rule in rules]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise InputError(f"client_rules: two of them have the name {repeated[0]!r}")
    if sum(rule.replay is not None for rule in rules) > 1:
        # a batch is extended from one replay buffer
        raise InputError("client_rules: only one of them can replay past examples")
    # rules may train parameters besides, which are merged even if all others are personal
    no_parameters = loss is None or ({*personal} == {*get_args(Personal)} and not rules)
    sends_nothing = no_parameters and not any(rule.reports for rule in server_rules)
    check_aggregation(server_rules, run.aggregation, sends_nothing)
    for rule in server_rules:
        # personal parts are () in uploads: no server rule can read them
        missing = sorted({*merged_by_rules((rule,))} & {*personal})
        if sees_each_client((rule,)):
            missing += personal
        if missing:
            raise InputError(f"personal: {missing[0]} is not sent, and {rule.name} needs it")


# ---- parameters ------------------------------------------------------------------------


def _first_task(sizes: Sizes) -> Task:
    """Return the first task of the stream, from which states get their shapes."""
    # states get only shapes from it: any task with the right number of classes would do
    ids = np.arange(sizes.classes, dtype=np.int32)
    current = ids < sizes.task_classes
    return Task.of_numpy(np.int32(0), ids[: sizes.task_classes], current, current)


def _trainable(parts: _Parts, params: Params, task: Task) -> Params:
    """Return the trainable parameters of a task: the learner's and those of client rules."""
    return parts.learner.trainable(params, task)._replace(extra=params.extra)


def _merged(parts: _Parts, params: Params, task: Task, mean: Params) -> Params:
    """Return the parameters of all tasks with the means of this task's.

    Parameters that server rules merge, or that are personal, stay unchanged.
    """
    trainable = _trainable(parts, params, task)
    # `mean` has () for these, or values that must not replace them
    names = (*parts.merged_by_rules, *parts.personal)
    unmerged = {name: getattr(trainable, name) for name in names}
    mean = mean._replace(**unmerged)
    return parts.learner.merge(params, task, mean)._replace(extra=mean.extra)


def _without_personal(parts: _Parts, trainable: Params) -> Params:
    """Return trainable parameters with () in place of personal ones."""
    empty: dict[str, PyTree] = dict.fromkeys(parts.personal, ())
    return trainable._replace(**empty)


def _averaged(parts: _Parts, trainable: Params) -> Params:
    """Return the parameters that the aggregation rule merges, with () in place of others."""
    empty: dict[str, PyTree] = dict.fromkeys(parts.merged_by_rules, ())
    return _without_personal(parts, trainable)._replace(**empty)


class SentParams(NamedTuple):
    """The trainable parameters that a client sends, or those of all clients [P, ...]."""

    averaged: Params
    """Those that the aggregation rule merges, with () in place of others; the clients'
    mean if uploads are summed as they arrive."""
    by_rules: dict[str, PyTree]
    """Those that server rules merge, by name."""

    @classmethod
    def of(cls, parts: _Parts, trainable: Params) -> SentParams:
        """Split trainable parameters by the rule that merges them."""
        by_rules = {name: getattr(trainable, name) for name in parts.merged_by_rules}
        return cls(_averaged(parts, trainable), by_rules)

    @classmethod
    def unpack(cls, parts: _Parts, mean: Params | tuple, gather: dict[str, PyTree]) -> SentParams:
        """Return the parameters in the channels of an upload: the inverse of `pack`."""
        if parts.reads_each_client:
            # gathered parameters of each client hold both kinds
            return cls.of(parts, gather["trainable"])
        if parts.run.aggregation.reduce:
            # the entry of `gather`, as the engine's `mean` channel is a running sum
            mean = gather["mean"]
        assert isinstance(mean, Params)
        return cls(mean, {name: gather[name] for name in parts.merged_by_rules})

    def pack(self, parts: _Parts) -> tuple[Params | tuple, dict[str, PyTree]]:
        """Return the `mean` and the `gather` of an upload."""
        if parts.reads_each_client:
            # a server rule reads the parameters of each client
            return (), {"trainable": self.averaged._replace(**self.by_rules)}
        if parts.run.aggregation.reduce:
            # the aggregation rule needs the parameters of all clients at once
            return (), self.by_rules | {"mean": self.averaged}
        return self.averaged, self.by_rules


# ---- personal parameters ---------------------------------------------------------------


def _personal_params(parts: _Parts, state: tuple) -> dict[Personal, PyTree]:
    """Return a client's personal parameters by name, the last entry of its state."""
    if parts.personal:
        return state[-1]
    return {}


def _personal_after(
    parts: _Parts, task: Task, trainable: Params, state: tuple
) -> tuple[dict[Personal, PyTree], ...]:
    """Return the personal parameters after training in a task, as the end of the state."""
    if not parts.personal:
        return ()
    params = {name: getattr(trainable, name) for name in parts.personal}
    # the state has the parameters of all tasks, of which only this task's have trained
    stored = _personal_params(parts, state)
    for name, part in _parts_over_tasks(parts, params):
        params[name] = part.merge(stored[name], task, params[name])
    return (params,)


def _start_params(parts: _Parts, context: ClientContext, state: tuple) -> Params:
    """Return a client's initial parameters in a round: the payload's and its personal ones."""
    params = dict(_personal_params(parts, state))
    for name, part in _parts_over_tasks(parts, params):
        params[name] = part.trainable(params[name], context.task)
    return context.payload.trainable._replace(**params)


def _parts_over_tasks(
    parts: _Parts, personal: dict[Personal, PyTree]
) -> list[tuple[Personal, Adapter | Classifier]]:
    """Return the personal parts with parameters of all tasks, of which a task selects some."""
    over_tasks: dict[Personal, Adapter | Classifier] = {
        "adapter": parts.learner.adapter,
        "classifier": parts.learner.classifier,
    }
    return [(name, part) for name, part in over_tasks.items() if name in personal]


# ---- the method's functions ------------------------------------------------------------


def _init(parts: _Parts, key: PRNGKeyArray, frozen: PyTree) -> ServerState:
    params = parts.learner.init(key, frozen)
    extra = {}
    for i, rule in enumerate(parts.rules):
        if rule.parameters:
            # a key for each rule, by its place: the learner's draws, from `key` itself,
            # and those of other rules stay the same
            extra[rule.name] = rule.parameters(jax.random.fold_in(key, InitKey.CLIENT_RULE + i))
    params = params._replace(extra=extra)
    trainable = _trainable(parts, params, _first_task(parts.run.sizes))
    provisional = ()
    if parts.server_trains:
        provisional = trainable
    return ServerState(
        params,
        rules=tuple(rule.init(params, trainable) for rule in (*parts.each_round, *parts.per_task)),
        aggregation=parts.run.aggregation.init(_averaged(parts, trainable)),
        provisional=provisional,
    )


def _init_client(parts: _Parts, key: PRNGKeyArray, server: ServerState) -> tuple[PyTree, ...]:
    trainable = _trainable(parts, server.params, _first_task(parts.run.sizes))
    states = tuple(rule.init(key, trainable) for rule in parts.rules)
    if not parts.personal:
        return states
    if "adapter" in parts.personal:
        # `open_task` acts on the server's parameters alone, so a client's copy would have
        # no parameters of a new task
        check_all_last(parts.learner.adapter, trainable.adapter, "clients keep their own")
    # the server's initial values: all clients start from the same model
    return (*states, {name: getattr(server.params, name) for name in parts.personal})


def _begin_task(
    parts: _Parts, round_context: RoundContext, server: ServerState, _key: PRNGKeyArray
) -> ServerState:
    """Open the task in the learner, and reset the server optimiser: other parameters train now."""
    params = parts.learner.open_task(server.params, round_context.task)
    trainable = _trainable(parts, params, round_context.task)
    state = parts.run.aggregation.init(_averaged(parts, trainable))
    return server._replace(params=params, aggregation=state)


def _broadcast(parts: _Parts, round_context: RoundContext, server: ServerState) -> Broadcast:
    """Return trainable parameters, values of server rules, and the cache of earlier tasks."""
    # the order in which `_init` stores the states
    states = zip((*parts.each_round, *parts.per_task), server.rules, strict=True)
    sent = {rule.name: rule.sends(round_context.task, state) for rule, state in states if rule.sends}
    trainable = _without_personal(parts, _trainable(parts, server.params, round_context.task))
    return Broadcast(Payload(trainable, sent), parts.learner.cached(server.params))


def _counted(parts: _Parts, round_context: RoundContext, server: ServerState) -> dict[str, PyTree]:
    """Return the named groups of trainable parameters."""
    # clients that only report train nothing, whatever the classifier holds
    if parts.training.loss is None:
        return {}
    trainable = _trainable(parts, server.params, round_context.task)
    adapter = parts.learner.adapter.counted(trainable.adapter, round_context.task)
    return {"adapter": adapter, "classifier": trainable.classifier, **trainable.extra}


def _handover(parts: _Parts, round_context: RoundContext, server: ServerState) -> dict[str, PyTree]:
    """Return the trainable parameters of a task that clients cache afterwards, by path."""

    def by_path(tree: PyTree) -> dict[str, Array]:
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}

    cached = by_path(parts.learner.cached(server.params))
    trainable = _without_personal(parts, _trainable(parts, server.params, round_context.task))
    # what is not cached later needs no final download
    return {path: leaf for path, leaf in by_path(trainable).items() if path in cached}


def _predictions(parts: _Parts, predicts: str) -> dict[str, Any]:
    """Return the functions of a `Method` that predict, by name."""
    learner = parts.learner
    sampling = learner.sampling

    def predict(round_context: RoundContext, server: ServerState, batch: Batch) -> Float[Array, "batch C"]:
        logits = learner.predict(round_context.frozen, server.params, batch, round_context.task)
        if predicts == "all":
            return logits
        # the lowest finite number, not -inf: a softmax over no seen class would be NaN
        return jnp.where(round_context.task.seen, logits, jnp.finfo(logits.dtype).min)

    def predict_provisional(
        round_context: RoundContext,
        server: ServerState,
        batch: Batch,
    ) -> Array:
        params = _merged(parts, server.params, round_context.task, server.provisional)
        return predict(round_context, server._replace(params=params), batch)

    def client_params(server: ServerState, state: tuple) -> Params:
        return server.params._replace(**_personal_params(parts, state))

    def predict_client(
        round_context: RoundContext,
        server: ServerState,
        state: tuple,
        batch: Batch,
    ) -> Array:
        return predict(round_context, server._replace(params=client_params(server, state)), batch)

    def predict_drawn(
        round_context: RoundContext,
        server: ServerState,
        state: tuple,
        batch: Batch,
    ) -> Array:
        assert sampling is not None
        params = client_params(server, state)

        def probabilities(key: PRNGKeyArray) -> Array:
            drawn = server._replace(params=sampling.draw(key, params))
            return jax.nn.softmax(predict(round_context, drawn, batch))

        # a constant key: all test batches are judged by the same draws
        keys = jax.random.split(jax.random.key(StepKey.DRAWN_PARAMS), sampling.evaluation)
        # the posterior predictive is a mean of probabilities, not of logits; 1e-30 keeps
        # the logarithm finite where all draws give 0
        return jnp.log(jnp.mean(jax.lax.map(probabilities, keys), axis=0) + 1e-30)

    draws = sampling is not None and sampling.evaluation > 0
    functions: dict[str, Any] = {"predict": predict}
    if parts.personal:
        functions["predict_client"] = predict_client
    if draws:
        functions["predict_drawn"] = predict_drawn
    if parts.server_trains:
        functions["predict_provisional"] = predict_provisional
    return functions


# ---- rounds ----------------------------------------------------------------------------


def _rounds(parts: _Parts) -> tuple[Round, ...]:
    """Return the rounds that are played in every task."""
    rounds: tuple[Round, ...] = ()
    if parts.training.loss is not None:
        rounds += (Round(_program(parts), functools.partial(_serve, parts)),)
    if any(rule.pass_at("task_end", 0) for rule in parts.rules):
        rounds += (_task_end_round(parts),)
    # reports of a task's end come last, so that they see what clients stored at that time
    return rounds + tuple(_report_round(parts, number) for number in range(len(parts.per_task)))


def _task_end_round(parts: _Parts) -> Round:
    """Return the round after a task's last one, in which client rules see the final model."""

    def start(context: ClientContext, state: tuple, key: PRNGKeyArray) -> Local:
        memory = client.start_memory(parts.rules, "task_end", context, state, key)
        # no optimiser state and no totals: nothing trains, and nothing is reported
        return Local(_start_params(parts, context, state), (), memory, {}, jnp.int32(0))

    def finish(context: ClientContext, local: Local, state: tuple) -> tuple[Upload, tuple]:
        rule_states = client.end_state(parts.rules, "task_end", context, local, state)
        personal = _personal_after(parts, context.task, local.trainable, state)
        # an upload without content: the engine keeps a client's new state only if its
        # upload is valid
        return Upload(weight=context.client.examples), (*rule_states, *personal)

    phases = client.passes_at_task_end(parts.work(parts.rules, ()))
    return Round(Program(start, phases, finish), None, "everyone", "task_end")


def _report_round(parts: _Parts, number: int) -> Round:
    """Return a statistics round: every client with examples reports, once per task."""
    rule = parts.per_task[number]
    # of its state in `ServerState.rules`
    position = len(parts.each_round) + number
    # every example once and not augmented: sums over exactly the client's data
    usual = View(1, parts.training.batch_size, shuffle=False, augment=False)
    reports = tuple(
        dataclasses.replace(report, view=report.view or usual)
        for report in rule.reports
        if isinstance(report, Report)
    )

    def start(context: ClientContext, state: tuple, _key: PRNGKeyArray) -> Local:
        totals = client.first_totals(reports, context)
        return Local(_start_params(parts, context, state), (), (), totals, jnp.int32(0))

    def finish(context: ClientContext, local: Local, state: tuple) -> tuple[Upload, tuple]:
        # no client rule acts in a statistics round, so there are no memories
        end = ClientEnd(context, local.trainable, {})
        finalized = client.finalized(reports, end, local.totals)
        summed = _merged_as("sum", finalized)
        gathered = _merged_as("gather", finalized)
        # reports measure: the client's state stays
        return Upload(sum=summed, gather=gathered, weight=context.client.examples), state

    def server(round_context: RoundContext, state: ServerState, aggregate: Aggregate, key: PRNGKeyArray):
        merged_reports = {**aggregate.gather, **aggregate.sum}
        server_round = _server_round(parts, round_context, aggregate, merged_reports, key)
        params, rule_state, metrics = _updated(rule, server_round, state.params, state.rules[position])
        states = list(state.rules)
        states[position] = rule_state
        return state._replace(params=params, rules=tuple(states)), metrics

    phases = client.passes(parts.work((), reports), {}, reports)
    program = Program(start, phases, finish, claims=_claims(parts, reports, usual))
    return Round(program, server, who="everyone", when=rule.when)


# ---- the client ------------------------------------------------------------------------


def _program(parts: _Parts) -> Program:
    """Return a participant's round: passes before training, training, passes after it, upload."""
    learner = parts.learner
    training = parts.training
    reports = reports_of(parts.each_round)
    work = parts.work(parts.rules, reports)

    def start(context: ClientContext, state: tuple, key: PRNGKeyArray) -> Local:
        trainable = _start_params(parts, context, state)
        totals = client.first_totals(reports, context)
        memory = client.start_memory(parts.rules, "round", context, state, key)
        return Local(trainable, training.optimiser.init(trainable), memory, totals, jnp.int32(0))

    def finish(context: ClientContext, local: Local, state: tuple) -> tuple[Upload, tuple]:
        rule_states = client.end_state(parts.rules, "round", context, local, state)
        memories = {rule.name: memory for rule, memory in zip(parts.rules, local.memory, strict=True)}
        end = ClientEnd(context, local.trainable, memories)
        finalized = client.finalized(reports, end, local.totals)
        sent = local.trainable
        if learner.sends:
            sent = learner.sends(sent, context.task)
        personal = _personal_after(parts, context.task, local.trainable, state)
        return _upload(parts, context, sent, finalized), (*rule_states, *personal)

    view, choose, stored = _replay(parts)
    terms = client.term_names(work)
    # the engine measures each term's share of the gradient; a single term has share 1
    if len(terms) == 1:
        terms = ()
    train = Phase(view, functools.partial(client.train_step, work), choose, terms=terms)
    phases = (*client.passes_before(work), train, *client.passes_after(work))
    return Program(start, phases, finish, _receive(parts), stored, _claims(parts, reports, view))


def _replay(parts: _Parts) -> tuple[View, ChooseReplay | None, Callable[[tuple], Array] | None]:
    """Return the view of training, and of a rule with replay its choice and its buffer."""
    training = parts.training
    replaying = [(i, rule.replay) for i, rule in enumerate(parts.rules) if rule.replay]
    if not replaying:
        return View(training.epochs, training.batch_size), None, None
    # `_check_rules` lets only one rule replay
    ((index, replay),) = replaying

    def choose(context: ClientContext, local: Local, key: PRNGKeyArray) -> Array:
        return replay.choose(context, local.memory[index], key)

    def stored(state: tuple) -> Array:
        return replay.stored(state[index])

    return View(training.epochs, training.batch_size, replay=replay.count), choose, stored


def _claims(parts: _Parts, reports: tuple[Report, ...], view: View) -> tuple[Claim, ...]:
    """Return the claims of uploads that can be checked: of reports and the aggregation rule.

    Args:
      parts: of the method.
      reports: of the round.
      view: of reports without one.
    """

    def claim_of(report: Report) -> Claim:
        def holds(context: ClientContext, upload: Upload) -> Array:
            assert report.possible is not None
            # counts and sums are over all epochs of the report's pass
            examples = phase_examples(context.client.examples, report.view or view)
            info = context.client._replace(examples=jnp.asarray(examples))
            # reports are either gathered or summed, and names are unique over both
            sent = {**upload.gather, **upload.sum}[report.name]
            return report.possible(context._replace(client=info), sent)

        return Claim(report.name, holds)

    claims = tuple(claim_of(report) for report in reports if report.possible)
    if parts.run.aggregation.possible:
        claims += (parts.run.aggregation.possible,)
    return claims


def _merged_as(merge: str, finalized: dict[str, tuple[Report, PyTree]]) -> dict[str, PyTree]:
    """Return the reports that are merged in this way, by name."""
    return {name: sent for name, (report, sent) in finalized.items() if report.merge == merge}


def _upload(
    parts: _Parts, context: ClientContext, trainable: Params, finalized: dict[str, tuple[Report, PyTree]]
) -> Upload:
    """Return the upload of a client: its trainable parameters and its reports."""
    mean, params = SentParams.of(parts, trainable).pack(parts)
    gathered = _merged_as("gather", finalized) | params
    return Upload(mean, _merged_as("sum", finalized), gathered, context.client.examples)


def _receive(parts: _Parts) -> ReceiveUpload | None:
    """Return the aggregation rule's function of one arriving upload; None: it has none."""
    pre = parts.run.aggregation.pre
    if pre is None:
        return None

    def receive(context: ClientContext, upload: Upload) -> Upload:
        # clipping bounds the change from the broadcast, of what is averaged alone
        reference = _averaged(parts, context.payload.trainable)
        weight = jnp.asarray(upload.weight, jnp.float32)
        sent = SentParams.unpack(parts, upload.mean, upload.gather)
        averaged, weight = pre(sent.averaged, reference, weight)
        mean, params = sent._replace(averaged=averaged).pack(parts)
        return upload._replace(mean=mean, gather=upload.gather | params, weight=weight)

    return receive


# ---- the server ------------------------------------------------------------------------


def _serve(
    parts: _Parts,
    round_context: RoundContext,
    state: ServerState,
    aggregate: Aggregate,
    key: PRNGKeyArray,
) -> tuple[ServerState, Metrics]:
    """Merge the uploads, then apply the server rules in their order."""
    mean, aggregation = _aggregated(parts, round_context, state.aggregation, aggregate, key)
    params = _merged(parts, state.params, round_context.task, mean)
    provisional = ()
    if parts.server_trains:
        # the mean before the server trains it further, so that both can be evaluated
        provisional = _trainable(parts, params, round_context.task)
    sent = SentParams.unpack(parts, aggregate.mean, aggregate.gather)
    reports = {**aggregate.gather, **aggregate.sum, **sent.by_rules}
    states = list(state.rules)
    metrics: Metrics = {}
    for i, rule in enumerate(parts.each_round):
        # the first rule has the server's key: a second rule does not change its draws
        rule_key = key
        if i > 0:
            rule_key = jax.random.fold_in(key, i)
        server_round = _server_round(parts, round_context, aggregate, reports, rule_key)
        params, states[i], rule_metrics = _updated(rule, server_round, params, states[i])
        metrics |= rule_metrics
    return ServerState(params, tuple(states), aggregation, provisional), metrics


def _aggregated(
    parts: _Parts,
    round_context: RoundContext,
    state: PyTree,
    aggregate: Aggregate,
    key: PRNGKeyArray,
) -> tuple[Params, PyTree]:
    """Return the merged parameters, and the state of the aggregation rule."""
    rule = parts.run.aggregation
    reference = _averaged(parts, round_context.previous.payload.trainable)
    mean = SentParams.unpack(parts, aggregate.mean, aggregate.gather).averaged
    # three cases: all uploads for a robust rule; all uploads because a server rule reads
    # them; else the engine has already averaged them as they arrived
    if rule.reduce:
        reduce_key = jax.random.fold_in(key, ServerKey.REDUCE)
        mean = rule.reduce(mean, reference, aggregate.weight, aggregate.valid, reduce_key)
    elif parts.reads_each_client:
        mean = weighted_mean(mean, aggregate.weight, aggregate.valid)
    if rule.post is None:
        return mean, state
    post_key = jax.random.fold_in(key, ServerKey.POST)
    return rule.post(mean, reference, state, jnp.sum(aggregate.valid), post_key)


def _server_round(
    parts: _Parts,
    round_context: RoundContext,
    aggregate: Aggregate,
    reports: dict[str, PyTree],
    key: PRNGKeyArray,
) -> ServerRound:
    """Return the inputs of a server rule."""
    return ServerRound(
        parts.learner,
        *round_context,  # frozen, task, index, last, previous: the fields that follow
        reports=reports,
        valid=aggregate.valid,
        ids=aggregate.id,
        weights=aggregate.weight,
        key=key,
    )


def _updated(
    rule: ServerRule, server_round: ServerRound, params: Params, state: PyTree
) -> tuple[Params, PyTree, Metrics]:
    """Apply a server rule, and prefix its metrics by its name."""
    result = rule.update(server_round, params, state)
    metrics = {f"{rule.name}_{name}": value for name, value in result.metrics.items()}
    return result.params, result.state, metrics


# ---- learners --------------------------------------------------------------------------


def feature_width(run: Run, features: Reads) -> int:
    """Return the width of what the classifier reads."""
    return run.network.width * (2 if features == "both" else 1)


def linear_learner(run: Run, keys: Keys = two_keys, features: Reads = "prompted") -> Learner:
    """Return the run's network and adapter with a linear classifier."""
    classifier = linear_on(run.adapter, feature_width(run, features), run.sizes.classes)
    return learner(run.network, run.adapter, classifier, keys, features)
