"""The search of `--scale fit`: a run chooses its learning rates on held-out training
examples.

A candidate is all learning rates of a preset times one factor. A range test plays a few
steps of some clients with each. The best play the first tasks under the run's protocol:
the same partition, rounds and draws. Between tasks, candidates with lower accuracy on
held-out examples are dropped (successive halving). Rates are data
(`federated/rates.py`), so the run's compiled programs play all candidates. Test images
are never read.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int
from rich.console import Console

from fcljax import config
from fcljax.federated import health
from fcljax.federated.schedule import ClientPartition
from fcljax.options import replaced
from fcljax.runs.build import Experiment, as_data, examples_of_task
from fcljax.runs.checkpoint import State
from fcljax.runs.evaluate import make_evaluate
from fcljax.runs.features import with_queries
from fcljax.runs.records import Clock, Records
from fcljax.runs.rounds import first_state, make_play
from fcljax.scenario import Scenario
from fcljax.settings import RunConfig, Scale
from fcljax.terminal import progress_bar
from fcljax.types import ReplayBuffer

# Factors on the base's rates, in the order in which they enter the range test. Larger
# rates come first, since a short schedule ends before small ones have arrived.
FACTORS = (1.0, 3.0, 10.0, 30.0, 0.3, 100.0, 0.1, 300.0, 1000.0)
HELD_OUT = 0.2  # largest share of a class's training examples that is held out
MOST_IMAGES = 200  # images of a task that evaluate a candidate
BUDGET = 0.5  # share of the run's training steps that a search may take
RANGE_SHARE = 0.3  # largest share of the budget for the range test
RANGE_CLIENTS = 3
RANGE_STEPS = 12  # steps of a client in the range test; with more epochs, one in each
# candidates of the range test: the first number that the budget allows
GRIDS = (len(FACTORS) + 1, 7, 5, 3, 2)
# the normal distribution's quantile for a one-sided test at 5 %
LEAD = 1.645
# in seeds, tells the draw of held-out examples from other draws
PURPOSE = 0x46495453
# (candidates of the first task, tasks, least share of the clients): the first design
# within the budget is taken. Two tasks come before one, even with fewer clients,
# because a single task does not show what a candidate forgets. Examples of clients that
# stay out evaluate.
DESIGNS = ((3, 2, 0.5), (2, 2, 0.26), (3, 1, 0.5), (2, 1, 0.0))

Key = TypeVar("Key")


class Candidate(NamedTuple):
    """Learning rates that the search may choose."""

    scale: Scale
    """Scale whose rates are multiplied."""
    factor: float
    """Factor of all of them."""

    def rates(self, settings: RunConfig) -> dict[str, float]:
        """Return option -> learning rate."""
        return {name: rate * self.factor for name, rate in base_rates(settings, self.scale).items()}


class Tried(NamedTuple):
    """A candidate's accuracy on held-out examples."""

    candidate: Candidate
    stage: str
    """ "range test" or "tasks"."""
    tasks: int
    """Number of tasks that were played."""
    accuracy: float | None
    """A_last; None if it is not finite."""
    images: int
    """Number of images that it was measured on."""
    diverged: bool = False
    """Whether a task ended with a training loss above that of guessing."""


class ChosenRates(NamedTuple):
    """The result of a search."""

    settings: RunConfig
    """Settings of the run, with the rates."""
    line: str
    """The choice and its reason, for the user."""
    trials: list[Tried]
    """Trials, in the order in which they were played."""
    steps: int
    """Training steps of all trials together."""
    run_steps: int
    """Training steps of the run."""
    seconds: float
    """Seconds that the search took."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry `rate_search` of summary.json."""
        return {
            "line": self.line,
            "trials": [_trial_to_json(trial) for trial in self.trials],
            "steps": self.steps,
            "run_steps": self.run_steps,
            "seconds": self.seconds,
        }


def _trial_to_json(trial: Tried) -> dict[str, Any]:
    """Return a trial's fields, with those of its candidate."""
    fields = trial._asdict()
    del fields["candidate"]
    return fields | trial.candidate._asdict()


# ---- choosing: shared with `fcljax leaderboard` and `fcljax tune` ----------------------


def best(
    values: Mapping[Key, float | None],
    prefer: Callable[[Key], Any],
) -> Key | None:
    """Return the key with the highest value; None if no value is finite.

    Args:
      values: key -> value; None and values that are not finite lose.
      prefer: of keys with equal values, the one with the lowest `prefer` wins.
    """
    return next(iter(ranked(values, prefer)), None)


def ranked(
    values: Mapping[Key, float | None],
    prefer: Callable[[Key], Any],
) -> list[Key]:
    """Return the keys with finite values, the best first; arguments as of `best`."""
    finite = {key: value for key, value in values.items() if value is not None and math.isfinite(value)}
    return sorted(finite, key=lambda key: (-finite[key], prefer(key)))


def scaled(rates: Mapping[str, float], factor: float) -> dict[str, float]:
    """Return option -> learning rate times a factor, to four digits."""
    return {name: float(f"{rate * factor:.4g}") for name, rate in rates.items()}


# ---- the search ------------------------------------------------------------------------


def is_due(settings: RunConfig) -> bool:
    """Return whether a run with these settings searches its learning rates first."""
    return settings.scale == "fit" and not settings.rate_factor


def search(
    exp: Experiment,
    console: Console,
    say_line: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> ChosenRates:
    """Choose learning rates for an experiment. All processes of a run call this together.

    Args:
      exp: placed, with a `rate_factor` of 0.
      console: of the progress bar.
      say_line: receives the estimate.
      check: is called after every round; an exception ends the search.

    Returns:
      The settings with the chosen rates, which `with_choice` writes into the experiment.
    """
    began = time.perf_counter()
    settings = exp.settings
    total = run_steps(exp)
    if not config.learning_rates(settings):
        line = f"learning rates: {settings.method} has none, so --scale fit searches nothing"
        unchanged = replaced(settings, rate_factor=1.0)
        return ChosenRates(unchanged, line, [], 0, total, 0.0)
    design = design_of(exp, total)
    if design is None:
        why = "the run is too short for a search on half of its steps"
        return ChosenRates(*_usual(exp, why), [], 0, total, 0.0)
    say_line(_estimate(exp, design, total))
    with progress_bar("learning rates: {task.description}", "", console) as bar:
        progress = bar.add_task("range test", total=design.rounds)

        def on_round(stage: str) -> None:
            check()
            bar.update(progress, advance=1, description=stage)

        trials = list(_trials(exp, design, on_round))
    seconds = time.perf_counter() - began
    # a choice among candidates that all guess would be noise
    chosen = _chosen(trials)
    if chosen is None or _guessing(exp, trials):
        why = f"no factor ended above guessing ({_counts(trials, seconds)})"
        return ChosenRates(*_usual(exp, why), trials, design.steps, total, seconds)
    rates = base_rates(settings, chosen.scale)
    changed = replaced(settings, **rates, rate_factor=chosen.factor)
    whose = _whose(settings, chosen)
    line = f"learning rates: {whose}, chosen on {_images_of(exp, design, trials)}, {_counts(trials, seconds)}"
    if settings.fidelity == "improved":
        line += "; fidelity improved"
    return ChosenRates(changed, line, trials, design.steps, total, seconds)


def with_choice(exp: Experiment, settings: RunConfig) -> Experiment:
    """Return the experiment with other learning rates and the same compiled programs."""
    rates = exp.engine.place(as_data(config.learning_rates(settings)))
    return exp._replace(settings=settings, frozen=exp.frozen._replace(rates=rates))


def base_rates(settings: RunConfig, scale: Scale) -> dict[str, float]:
    """Return option -> learning rate that factors multiply, of settings or scale mini."""
    names = config.learning_rates(settings)
    if scale == "mini":
        return config.rates_of_scale(settings, "mini")
    return {name: getattr(settings, name) for name in names}


def candidates_of(settings: RunConfig, short: bool) -> list[Candidate]:
    """Return the candidates, the likeliest first.

    They are a base's rates times each factor, and the rates of the other scale. The base
    of a run whose schedule is shorter than the paper's are mini's rates, whose ratios
    are made for few steps. Otherwise it is the settings' rates.

    Args:
      settings: if the user gave a rate, only the settings' rates are a base.
      short: whether the schedule is shorter than the paper's.
    """
    # a rate of the user's own has no counterpart at the scale mini
    multiples_of_paper = [Candidate("paper", factor) for factor in FACTORS]
    if not _is_usual(settings):
        return multiples_of_paper
    mini = Candidate("mini", 1.0)
    multiples = multiples_of_paper
    other = mini
    if short:
        multiples = [Candidate("mini", factor) for factor in FACTORS]
        other = Candidate("paper", 1.0)
        # where mini's rates are a multiple of the paper's, no candidate is tried twice
        if any(_same_rates(candidate, other, settings) for candidate in multiples):
            return multiples
    rest = [candidate for candidate in multiples if not _same_rates(candidate, mini, settings)]
    return [mini, *(() if other == mini else (other,)), *rest]


def _is_usual(settings: RunConfig) -> bool:
    """Return whether the user gave no learning rate."""
    return base_rates(settings, "paper") == config.rates_of_scale(settings, "paper")


def _is_short(exp: Experiment) -> bool:
    """Return whether a client has fewer training steps in a task than in the method's paper."""
    return config.share_of_schedule(exp.settings, "paper", examples_of_task(exp.scenario)) < 1


def _usual(exp: Experiment, why: str) -> tuple[RunConfig, str]:
    """Return the settings for a search that decides nothing, and a line for the user.

    The rates are those of the scale whose schedule is nearer: mini's for a run that is
    shorter than the method's paper, else the paper's, or those that were given.
    """
    settings = exp.settings
    if _is_short(exp) and _is_usual(settings):
        rates = base_rates(settings, "mini")
        whose = "mini's"
    else:
        rates = {}
        whose = "those given"
        if _is_usual(settings):
            whose = "the paper's"
    return replaced(settings, **rates, rate_factor=1.0), f"learning rates: {whose}, because {why}"


def _same_rates(a: Candidate, b: Candidate, settings: RunConfig) -> bool:
    """Return whether two candidates have equal rates, up to rounding."""
    rates_a = list(a.rates(settings).values())
    rates_b = list(b.rates(settings).values())
    return np.allclose(rates_a, rates_b, rtol=1e-6, atol=0)


def _whose(settings: RunConfig, chosen: Candidate) -> str:
    """Return the chosen rates in words, such as "30 x the paper's"."""
    multiples = (Candidate("paper", factor) for factor in FACTORS)
    factors = [candidate.factor for candidate in multiples if _same_rates(candidate, chosen, settings)]
    if not factors and chosen.factor == 1:
        return "mini's"
    if not factors:
        return f"{chosen.factor:g} x mini's"
    reference = "those given"
    if _is_usual(settings):
        reference = "the paper's"
    return f"{factors[0]:g} x {reference}"


def _counts(trials: Sequence[Tried], seconds: float) -> str:
    """Return the number of trials and the time of a search in words."""
    count = len({trial.candidate for trial in trials if trial.stage == "tasks"})
    time_taken = f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
    return f"a range test and {count} trials, {time_taken}"


# ---- what is played --------------------------------------------------------------------


class Design(NamedTuple):
    """The plan of a search."""

    candidates: list[Candidate]
    """Candidates of the range test."""
    range_clients: Int[np.ndarray, " n"]
    """Clients of the range test."""
    clients: Int[np.ndarray, " m"]
    """Clients of the trials."""
    begin: int
    """Number of candidates that play the first task; 0: the range test decides."""
    tasks: int
    """Number of tasks of a trial."""
    held_out: Int[np.ndarray, " N"]
    """The task of each held-out training example; -1 elsewhere."""
    steps: int
    """Training steps of the whole search."""
    rounds: int
    """Rounds of the whole search."""


def steps_of(
    exp: Experiment,
    partition: ClientPartition,
    clients: np.ndarray | None = None,
    most: int | None = None,
) -> int:
    """Return a round's training steps of some clients, each with at most `most` examples."""
    count = partition.count
    if clients is not None:
        count = partition.count[clients]
    if most is not None:
        count = np.minimum(count, most)
    epochs = exp.settings.epochs
    size = exp.settings.batch_size
    return int(np.sum(epochs * -(-count // size)))


def run_steps(exp: Experiment) -> int:
    """Return the training steps of a run whose rounds have average participants."""
    return sum(task_steps(exp, t) for t in range(len(exp.scenario.tasks)))


def task_steps(exp: Experiment, t: int, clients: np.ndarray | None = None) -> int:
    """Return the training steps of some clients, or of all, in a task."""
    # sampled clients are not drawn here: the steps of all, times the share that takes
    # part
    part = exp.settings.participation
    partitions = exp.scenario.partitions[t]
    eligible = [int(np.sum(partition.count > 0)) for partition in partitions]
    shares = [part if part <= 1 else min(1.0, part / max(1, count)) for count in eligible]
    steps = [steps_of(exp, partition, clients) for partition in partitions]
    return math.ceil(sum(share * step for share, step in zip(shares, steps, strict=True)))


def design_of(exp: Experiment, total: int) -> Design | None:
    """Return what a search plays within its budget; None if nothing fits into it."""
    budget = BUDGET * total
    first_partition = exp.scenario.partitions[0][0]
    ordered = spread(first_partition)
    max_examples = range_examples(exp.settings)
    every_candidate = candidates_of(exp.settings, _is_short(exp))
    # fewer clients before fewer candidates: a rate that is not tried cannot win
    affordable = [
        (candidates, ordered[:n])
        for candidates in (every_candidate[:count] for count in GRIDS)
        for n in range(min(RANGE_CLIENTS, len(ordered)), 0, -1)
        if len(candidates) * steps_of(exp, first_partition, ordered[:n], max_examples) <= RANGE_SHARE * budget
    ]
    if not affordable:
        return None
    candidates, range_clients = affordable[0]
    spent = len(candidates) * steps_of(exp, first_partition, range_clients, max_examples)
    begin, tasks, clients = _trials_within(exp, budget - spent, ordered, len(candidates))
    for t in range(tasks):
        spent += _playing(begin, t) * task_steps(exp, t, clients)
    rounds = len(candidates) + exp.settings.rounds * sum(_playing(begin, t) for t in range(tasks))
    held_out = hold_out_examples(exp.scenario, max(1, tasks), exp.settings.seed)
    return Design(candidates, range_clients, clients, begin, tasks, held_out, spent, rounds)


def range_examples(settings: RunConfig) -> int:
    """Return the largest number of a client's examples in the range test."""
    return settings.batch_size * max(1, RANGE_STEPS // settings.epochs)


def _playing(begin: int, task: int) -> int:
    """Return how many candidates play a task."""
    # successive halving: from the second task on, the best two go on
    if task == 0:
        return begin
    return min(begin, 2)


def _trials_within(
    exp: Experiment, budget: float, order: np.ndarray, candidates: int
) -> tuple[int, int, np.ndarray]:
    """Return candidates, tasks and clients of trials within a number of steps."""
    num_tasks = len(exp.scenario.tasks)
    for begin, tasks, share in DESIGNS:
        begin = min(begin, candidates)
        tasks = min(tasks, num_tasks)
        for n in range(len(order), max(1, math.ceil(share * len(order))) - 1, -1):
            if sum(_playing(begin, t) * task_steps(exp, t, order[:n]) for t in range(tasks)) <= budget:
                return begin, tasks, order[:n]
    return 0, 0, order[:0]


def spread(partition: ClientPartition) -> Int[np.ndarray, " n"]:
    """Return the clients with examples, each the one that adds most classes to those
    before it.

    Of clients that add as many, the one with most examples comes first.
    """
    has = partition.class_examples > 0
    count = partition.count
    left: list[int] = np.flatnonzero(count).tolist()
    order: list[int] = []
    while left:
        # -client: of equal clients the one with the lower id, whatever the order of
        # `left`
        missing = ~np.any(has[order], axis=0)
        gain = [(int(np.sum(has[client] & missing)), int(count[client]), -client) for client in left]
        order.append(-max(gain)[2])
        left.remove(order[-1])
    return np.array(order, int)


def hold_out_examples(scenario: Scenario, tasks: int, seed: int) -> Int[np.ndarray, " N"]:
    """Return the task of each held-out example of the first tasks, and -1 elsewhere.

    A share of each class's examples is held out: at least one of several, and never a
    client's last one.
    """
    task_of = np.full(len(scenario.train_label), -1)
    rng = np.random.default_rng([seed, PURPOSE])
    assigned = np.zeros(len(task_of), bool)
    for t, partitions in enumerate(scenario.partitions[:tasks]):
        examples = np.unique(np.concatenate([partition.indices for partition in partitions]))
        examples = examples[~assigned[examples]]
        assigned[examples] = True
        task_of[_held_out(scenario.train_label, examples, partitions[0], rng)] = t
    return task_of


def _held_out(
    label: np.ndarray,
    examples: np.ndarray,
    partition: ClientPartition,
    rng: np.random.Generator,
) -> list[int]:
    """Return the held-out examples of a task."""
    owner = np.full(len(label), -1)
    owner[partition.indices] = np.repeat(np.arange(len(partition.count)), partition.count)
    # owner -1, the last entry, stands for examples that no client has in the first round:
    # of these any number may be held out
    left = np.append(partition.count, len(label))
    share = min(HELD_OUT, MOST_IMAGES / max(1, len(examples)))
    held_out = []
    for class_id in np.unique(label[examples]):
        of_class = rng.permutation(examples[label[examples] == class_id])
        missing = max(int(share * len(of_class)), int(len(of_class) > 1))
        for index in of_class:
            if missing and left[owner[index]] > 1:
                left[owner[index]] -= 1
                held_out.append(int(index))
                missing -= 1
    return held_out


def without(
    partition: ClientPartition,
    label: Int[np.ndarray, " N"],
    held_out: Bool[np.ndarray, " N"],
    clients: Int[np.ndarray, " n"],
    most: int | None = None,
) -> ClientPartition:
    """Return the partition of some clients, without held-out examples.

    Args:
      partition: of a round.
      label: of all training examples.
      held_out: mask of these.
      clients: that stay.
      most: number of examples that a client keeps, evenly spaced; None: all.
    """
    owner = np.repeat(np.arange(len(partition.count)), partition.count)
    stays = ~held_out[partition.indices] & np.isin(owner, clients)
    if most is not None:
        # of n examples by rank, those at which floor(rank * most / n) steps up: `most`
        # of them, evenly spaced, so that a client whose examples lie class by class
        # keeps its mix
        left = np.bincount(owner[stays], minlength=len(partition.count))
        rank = np.arange(left.sum()) - np.repeat(np.cumsum(left) - left, left)
        share = most / left[owner[stays]]
        stays[stays] = np.floor(rank * share) != np.floor((rank - 1) * share)
    owner = owner[stays]
    indices = partition.indices[stays]
    count = np.bincount(owner, minlength=len(partition.count))
    of_class = np.zeros_like(partition.class_examples)
    np.add.at(of_class, (owner, label[indices]), 1)
    offset = np.concatenate([[0], np.cumsum(count)]).astype(partition.offset.dtype)
    return partition._replace(indices=indices, offset=offset, class_examples=of_class)


def scenario_without(
    scenario: Scenario, design: Design, clients: np.ndarray, most: int | None, seed: int
) -> Scenario:
    """Return the scenario of some clients, each with at most `most` examples in a round.

    Its test examples are training examples that no client trains on: held-out examples,
    and those of the clients that do not take part.
    """
    label = scenario.train_label
    held_out = design.held_out >= 0
    tasks = max(1, design.tasks)

    def part(partition: ClientPartition) -> ClientPartition:
        return without(partition, label, held_out, clients, most)

    partitions = [[part(partition) for partition in of_task] for of_task in scenario.partitions[:tasks]]
    whole = tuple(part(partition) for partition in scenario.whole[:tasks])
    training_indices = [partition.indices for of_task in (*partitions, whole) for partition in of_task]
    return scenario._replace(
        partitions=[*partitions, *scenario.partitions[tasks:]],
        whole=(*whole, *scenario.whole[tasks:]),
        test_label=label,
        test_task=_evaluated(scenario, design, np.concatenate(training_indices), seed),
    )


def _evaluated(
    scenario: Scenario,
    design: Design,
    trained: np.ndarray,
    seed: int,
) -> Int[np.ndarray, " N"]:
    """Return the task of each training example that evaluates candidates, and -1
    elsewhere.

    Held-out examples come first, then other examples that no client trains on, up to
    `MOST_IMAGES` of a task.
    """
    task_of = np.full(len(scenario.train_label), -1)
    rng = np.random.default_rng([seed, PURPOSE + 1])
    free = np.ones(len(task_of), bool)
    free[trained] = False
    for t, of_task in enumerate(scenario.partitions[: max(1, design.tasks)]):
        examples = np.unique(np.concatenate([partition.indices for partition in of_task]))
        examples = rng.permutation(examples[free[examples]])
        held_out_first = np.argsort(design.held_out[examples] < 0, kind="stable")
        task_of[examples[held_out_first][:MOST_IMAGES]] = t
        free[examples] = False
    return task_of


class AfterTasks(NamedTuple):
    """The state of a candidate after some tasks."""

    state: State
    past: tuple[ReplayBuffer, ...]
    diverged: bool = False
    """Whether a task ended with a training loss above that of guessing."""


class _Stage:
    """Plays candidates on the held-out scenario of some clients."""

    def __init__(self, exp: Experiment, clients: np.ndarray, design: Design, short: bool):
        """Prepare trials; `short`: a task has one round of a few steps, of all these
        clients."""
        settings = exp.settings
        most = None
        if short:
            most = range_examples(settings)
            settings = dataclasses.replace(settings, rounds=1, participation=1.0)
        scenario = scenario_without(exp.scenario, design, clients, most, settings.seed)
        # candidates are compared on the classes of their tasks
        method = exp.method._replace(names_classes=False)
        self.exp = exp._replace(settings=settings, scenario=scenario, test=exp.train, method=method)
        self.evaluate = make_evaluate(self.exp)
        self.play = make_play(self.exp, Records(), Clock({}))

    def task(
        self,
        rates: Mapping[str, float],
        played: AfterTasks,
        t: int,
        on_round: Callable[[], None],
    ) -> AfterTasks:
        """Play another task."""
        exp = self.exp._replace(frozen=self.exp.frozen._replace(rates=self.exp.engine.place(as_data(rates))))
        state, past, diverged = played
        for r in range(exp.settings.rounds):
            state, buffer, report, _ = self.play(exp, state, past, t, r)
            if buffer is not None:
                past += (buffer,)
            on_round()
        classes_seen = int(np.sum(exp.scenario.tasks[t].seen))
        last_line = {**report.metrics, health.CLASSES: classes_seen}
        return AfterTasks(state, past, diverged or health.above_guessing(last_line))

    def tried(self, candidate: Candidate, stage: str, after: AfterTasks, t: int) -> Tried:
        """Evaluate a candidate after task t."""
        shares = np.array(self.evaluate(self.exp.train, after.state, t, Records()).accuracy, float)
        accuracy = None
        if np.isfinite(shares).any():
            accuracy = float(np.nanmean(shares))
        images = int(np.sum(self.exp.scenario.tests_seen(t)))
        return Tried(candidate, stage, t + 1, accuracy, images, after.diverged)


def _trials(
    exp: Experiment,
    design: Design,
    on_round: Callable[[str], None],
) -> Iterable[Tried]:
    """Play the range test, then the trials; yield each when it is over."""
    tasks = max(1, design.tasks)
    exp = with_queries(exp, ("train",), range(tasks))
    settings = exp.settings
    start = first_state(exp)
    range_test = _Stage(exp, design.range_clients, design, short=True)
    accuracy: dict[Candidate, float | None] = {}
    for candidate in design.candidates:
        fresh = AfterTasks(_copied(start), ())
        after = range_test.task(candidate.rates(settings), fresh, 0, lambda: on_round("range test"))
        tried = range_test.tried(candidate, "range test", after, 0)
        accuracy[candidate] = tried.accuracy
        yield tried
    if not design.begin:
        return
    stage = _Stage(exp, design.clients, design, short=False)
    # from the start again: the range test has trained a few clients on a few examples
    running = {candidate: AfterTasks(_copied(start), ()) for candidate in promising(accuracy, design.begin)}
    for t in range(design.tasks):
        remaining = promising(accuracy, _playing(design.begin, t))
        running = {candidate: running[candidate] for candidate in remaining}
        for candidate in running:
            rates = candidate.rates(settings)
            on_round_of_task = functools.partial(on_round, f"task {t + 1}")
            running[candidate] = stage.task(rates, running[candidate], t, on_round_of_task)
            tried = stage.tried(candidate, "tasks", running[candidate], t)
            accuracy[candidate] = tried.accuracy
            yield tried
        accuracy = {candidate: accuracy[candidate] for candidate in running}


def promising(accuracy: Mapping[Candidate, float | None], count: int) -> list[Candidate]:
    """Return the candidates that continue: mini's rates if finite, and the best others."""
    mini = Candidate("mini", 1.0)
    order = ranked(accuracy, _size)
    return sorted(order, key=lambda candidate: candidate != mini)[:count]


def _size(candidate: Candidate) -> tuple[bool, float]:
    """Return the rank among equal accuracies: mini's rates first, then smaller factors."""
    return candidate != Candidate("mini", 1.0), candidate.factor


def _compared(trials: Sequence[Tried]) -> list[Tried]:
    """Return the trials of the last stage with most tasks."""
    of_stage = [trial for trial in trials if trial.stage == trials[-1].stage]
    tasks = max(trial.tasks for trial in of_stage)
    return [trial for trial in of_stage if trial.tasks == tasks]


def _chosen(trials: Sequence[Tried]) -> Candidate | None:
    """Return the best of the candidates compared last, if it leads the usual one by more
    than chance; otherwise the usual one.

    The usual one is mini's rates or, without them, the best that did not diverge. A loss
    above guessing alone drops no candidate: a linear classifier on features with a large
    norm can have a loss of 40 and the highest accuracy.

    The lead of a share p over a share q, both of n images, has the standard error
    sqrt(2 m (1 - m) / n) with m = (p + q) / 2 where they are equal. It has to be `LEAD`
    times as large.
    """
    compared = _compared(trials)
    accuracy = {trial.candidate: trial.accuracy for trial in compared}
    order = ranked(accuracy, _size)
    if not order:
        return None
    diverged = {trial.candidate for trial in compared if trial.diverged}
    usual = [candidate for candidate in order if candidate == Candidate("mini", 1.0)]
    usual += [candidate for candidate in order if candidate not in diverged]
    if not usual:
        return order[0]
    p = accuracy[order[0]]
    q = accuracy[usual[0]]
    assert p is not None and q is not None  # ranked: finite
    mean = (p + q) / 2
    error = math.sqrt(2 * mean * (1 - mean) / trials[-1].images)
    if p - q > LEAD * error:
        return order[0]
    return usual[0]


def _guessing(exp: Experiment, trials: Sequence[Tried]) -> bool:
    """Return whether no candidate beat guessing by more than its standard error."""
    compared = _compared(trials)
    classes = int(np.sum(np.asarray(exp.scenario.tasks[compared[0].tasks - 1].seen)))
    guess = 1 / classes
    error = math.sqrt(guess * (1 - guess) / compared[0].images)
    return max(trial.accuracy or 0.0 for trial in compared) <= guess + error


def _copied(state: State) -> State:
    """Copy a state on its device, since rounds overwrite their arguments."""
    return jax.tree.map(jnp.copy, state)


def _images_of(exp: Experiment, design: Design, trials: Sequence[Tried]) -> str:
    """Return the images that decided, in words."""
    partitions = exp.scenario.partitions[: max(1, design.tasks)]
    examples = np.unique(
        np.concatenate([partition.indices for of_task in partitions for partition in of_task])
    )
    share = trials[-1].images / len(examples)
    whose = f"{_first(design)}'"
    if design.tasks <= 1:
        whose += "s"
    return f"{100 * share:.0f} % of the {whose} training examples"


def _first(design: Design) -> str:
    """Return the tasks of the trials in words."""
    if design.tasks <= 1:
        return "first task"
    return f"first {design.tasks} tasks"


def _estimate(exp: Experiment, design: Design, total: int) -> str:
    """Return the line about the cost of the search."""
    steps = config.steps_of_task(exp.settings, examples_of_task(exp.scenario))
    return (
        f"learning rates: a client takes about {steps:.0f} steps a task; searching {len(design.candidates)} "
        f"candidates on held-out examples of the {_first(design)}, {design.steps} training steps where the "
        f"run has {total} ({100 * design.steps / total:.0f} %)"
    )
