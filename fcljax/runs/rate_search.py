"""The search of `--scale fit`: learning rates that a run chooses on held-out training examples before its
first round.

All learning rates of a method times one factor, or mini's rates, are candidates. A range test plays a few
steps of some clients with each, and those that do best play the first tasks under the run's protocol: the
same partition, rounds and draws. Candidates with lower accuracy on the examples that were held out are
dropped between tasks (successive halving). Rates are data (`federated/rates.py`), so the run's own compiled
programs play all candidates, and test images are never read.
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

FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
HELD_OUT = 0.2  # share of a class's training examples
MOST_IMAGES = 200  # of a task, on which a candidate is evaluated
BUDGET = 0.5  # of the run's training steps
RANGE_SHARE = 0.3  # of these, that the range test takes at most
RANGE_CLIENTS = 3
RANGE_STEPS = 12  # of a client in the range test, or one in each epoch
GRIDS = (1, 2, 4)  # of the factors every one, every second or every fourth
LEAD = 1.645  # standard errors: one-sided, at 5 %
PURPOSE = 0x46495453  # of the draw of held-out examples, among those of the seed
# how many candidates begin, on how many tasks they are compared, and the least share of the clients in every
# trial: the first that the budget allows. One task does not show what is forgotten.
DESIGNS = ((3, 2, 0.5), (2, 2, 0.34), (3, 1, 0.5), (2, 1, 0.0))

Key = TypeVar("Key")


class Candidate(NamedTuple):
    """Learning rates that may be chosen."""

    scale: Scale
    """Whose rates are multiplied."""
    factor: float
    """By how much."""

    def rates(self, settings: RunConfig) -> dict[str, float]:
        """Option -> learning rate."""
        return {name: rate * self.factor for name, rate in base_rates(settings, self.scale).items()}


class Tried(NamedTuple):
    """A candidate's accuracy on held-out examples."""

    candidate: Candidate
    stage: str
    """ "range test" or "tasks"."""
    tasks: int
    """How many were played."""
    accuracy: float | None
    """A_last; None: it is not finite."""
    images: int
    """How many it was measured on."""


class ChosenRates(NamedTuple):
    """What was chosen, and how."""

    settings: RunConfig
    """Of the run."""
    line: str
    """For the user."""
    trials: list[Tried]
    """In the order in which they were played."""
    steps: int
    """Training steps of all trials together."""
    run_steps: int
    """Training steps of the run."""
    seconds: float
    """That the search took."""

    def to_json(self) -> dict[str, Any]:
        """The entry `rate_search` of summary.json."""
        trials = [{**each._asdict(), **each.candidate._asdict()} for each in self.trials]
        for each in trials:
            del each["candidate"]
        return {
            "line": self.line,
            "trials": trials,
            "steps": self.steps,
            "run_steps": self.run_steps,
            "seconds": self.seconds,
        }


# ---- choosing: shared with `fcljax leaderboard` and `fcljax tune` ------------------------------------------


def best(values: Mapping[Key, float | None], prefer: Callable[[Key], float]) -> Key | None:
    """The key with the highest value, of equal ones that with the lowest `prefer`; values that are None or
    not finite lose. None: there is no other."""
    ranked_ = ranked(values, prefer)
    return ranked_[0] if ranked_ else None


def ranked(values: Mapping[Key, float | None], prefer: Callable[[Key], float]) -> list[Key]:
    """The keys with finite values, the best first; arguments as of `best`."""
    known = {key: value for key, value in values.items() if value is not None and math.isfinite(value)}
    return sorted(known, key=lambda key: (-known[key], prefer(key)))


def scaled(rates: Mapping[str, float], factor: float) -> dict[str, float]:
    """Option -> learning rate times a factor, to four digits."""
    return {name: float(f"{rate * factor:.4g}") for name, rate in rates.items()}


# ---- the search --------------------------------------------------------------------------------------------


def is_due(settings: RunConfig) -> bool:
    """Whether a run with these settings searches its learning rates before its first round."""
    return settings.scale == "fit" and not settings.rate_factor


def search(
    exp: Experiment,
    console: Console,
    say_line: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> ChosenRates:
    """Choose learning rates for an experiment, which must be placed. All processes of a run call it together.

    Args:
      exp: the experiment, whose `rate_factor` is 0.
      console: where a progress bar goes.
      say_line: hears the estimate.
      check: called after every round; what it raises ends the search.

    Returns:
      The settings with what was chosen; their rates belong into `exp.frozen` (`with_choice`).
    """
    began = time.perf_counter()
    settings = exp.settings
    total = run_steps(exp)
    if not config.learning_rates(settings):
        line = f"learning rates: {settings.method} has none, so --scale fit searches nothing"
        return ChosenRates(replaced(settings, rate_factor=1.0), line, [], 0, total, 0.0)
    design = design_of(exp, total)
    if design is None:
        why = "the run is too short for a search on half of its steps"
        return ChosenRates(*_usual(exp, why), [], 0, total, 0.0)
    say_line(_estimate(exp, design, total))
    with progress_bar("learning rates: {task.description}", "", console) as bar:
        shown = bar.add_task("range test", total=design.rounds)

        def on_round(stage: str) -> None:
            check()
            bar.update(shown, advance=1, description=stage)

        trials = list(_trials(exp, design, on_round))
    seconds = time.perf_counter() - began
    chosen = _chosen(trials)
    if chosen is None or _guessing(exp, trials):
        why = f"no factor ended above guessing ({_counts(trials, seconds)})"
        return ChosenRates(*_usual(exp, why), trials, design.steps, total, seconds)
    rates = base_rates(settings, chosen.scale)
    changed = replaced(settings, **rates, rate_factor=chosen.factor)
    whose = _whose(settings, chosen)
    line = f"learning rates: {whose}, chosen on {_images_of(exp, design, trials)}, {_counts(trials, seconds)}"
    line += "; fidelity improved" if settings.fidelity == "improved" else ""
    return ChosenRates(changed, line, trials, design.steps, total, seconds)


def with_choice(exp: Experiment, settings: RunConfig) -> Experiment:
    """The experiment with other learning rates, and the same compiled programs."""
    rates = exp.engine.place(as_data(config.learning_rates(settings)))
    return exp._replace(settings=settings, frozen=exp.frozen._replace(rates=rates))


def base_rates(settings: RunConfig, scale: Scale) -> dict[str, float]:
    """Option -> learning rate that factors multiply: the settings' own, or those of the scale mini."""
    names = config.learning_rates(settings)
    if scale == "mini":
        return config.rates_of_scale(settings, "mini")
    return {name: getattr(settings, name) for name in names}


def candidates_of(settings: RunConfig, every: int = 1) -> list[Candidate]:
    """The candidates: each `every`-th factor on the settings' rates, and mini's rates unless others are
    given. A factor that makes mini's rates is left out."""
    found = [Candidate("paper", factor) for factor in FACTORS[::every]]
    if not _is_usual(settings):
        return found
    mini = Candidate("mini", 1.0)
    return [*(each for each in found if not _same_rates(each, mini, settings)), mini]


def _is_usual(settings: RunConfig) -> bool:
    """Whether no learning rate was given."""
    return base_rates(settings, "paper") == config.rates_of_scale(settings, "paper")


def _usual(exp: Experiment, why: str) -> tuple[RunConfig, str]:
    """Return the settings for a search that decides nothing, and a line for the user.

    The rates are those of the scale whose schedule is nearer: mini's for a run that is shorter than the
    method's paper, else the paper's, or those that were given.
    """
    settings = exp.settings
    examples = examples_of_task(exp.scenario)
    short = config.share_of_schedule(settings, "paper", examples) < 1
    if short and _is_usual(settings):
        rates = base_rates(settings, "mini")
        whose = "mini's"
    else:
        rates = {}
        whose = "the paper's" if _is_usual(settings) else "those given"
    return replaced(settings, **rates, rate_factor=1.0), f"learning rates: {whose}, because {why}"


def _same_rates(one: Candidate, other: Candidate, settings: RunConfig) -> bool:
    return np.allclose(*(list(each.rates(settings).values()) for each in (one, other)), rtol=1e-6, atol=0)


def _whose(settings: RunConfig, chosen: Candidate) -> str:
    """Whose rates were chosen, times what."""
    same = (Candidate("paper", factor) for factor in FACTORS)
    factors = [each.factor for each in same if _same_rates(each, chosen, settings)]
    if not factors:
        return "mini's"
    return f"{factors[0]:g} x the paper's" if _is_usual(settings) else f"{factors[0]:g} x those given"


def _counts(trials: Sequence[Tried], seconds: float) -> str:
    played = len({each.candidate for each in trials if each.stage == "tasks"})
    took = f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
    return f"a range test and {played} trials, {took}"


# ---- what is played ----------------------------------------------------------------------------------------


class Design(NamedTuple):
    """What a search plays."""

    candidates: list[Candidate]
    """Of the range test."""
    range_clients: Int[np.ndarray, " n"]
    """Clients of the range test."""
    clients: Int[np.ndarray, " m"]
    """Clients of the trials."""
    begin: int
    """Candidates that play the first task; 0: the range test decides."""
    tasks: int
    """Tasks of the trials."""
    held_out: Int[np.ndarray, " N"]
    """The task of each training example that is held out, -1 of the others."""
    steps: int
    """Training steps of all of it."""
    rounds: int
    """Rounds of all of it."""


def steps_of(
    exp: Experiment, partition: ClientPartition, clients: np.ndarray | None = None, most: int | None = None
) -> int:
    """Training steps of these clients, or of all, in a round; with `most` of their examples."""
    count = partition.count if clients is None else partition.count[clients]
    count = count if most is None else np.minimum(count, most)
    epochs = exp.settings.epochs
    size = exp.settings.batch_size
    return int(np.sum(epochs * -(-count // size)))


def run_steps(exp: Experiment) -> int:
    """Training steps of a run, if its rounds have average participants."""
    return sum(task_steps(exp, t) for t in range(len(exp.scenario.tasks)))


def task_steps(exp: Experiment, t: int, clients: np.ndarray | None = None) -> int:
    """Training steps of these clients, or of all, in a task."""
    part = exp.settings.participation
    partitions = exp.scenario.partitions[t]
    eligible = [int(np.sum(partition.count > 0)) for partition in partitions]
    shares = [part if part <= 1 else min(1.0, part / max(1, count)) for count in eligible]
    steps = [steps_of(exp, partition, clients) for partition in partitions]
    return math.ceil(sum(share * step for share, step in zip(shares, steps, strict=True)))


def design_of(exp: Experiment, total: int) -> Design | None:
    """What a search plays within its budget; None: nothing fits into it."""
    budget = BUDGET * total
    first = exp.scenario.partitions[0][0]
    order = spread(first)
    most = range_examples(exp.settings)
    affordable = [
        (candidates, order[:n])
        for candidates in (candidates_of(exp.settings, every) for every in GRIDS)
        for n in range(min(RANGE_CLIENTS, len(order)), 0, -1)
        if len(candidates) * steps_of(exp, first, order[:n], most) <= RANGE_SHARE * budget
    ]
    if not affordable:
        return None
    candidates, few = affordable[0]
    spent = len(candidates) * steps_of(exp, first, few, most)
    begin, tasks, clients = _trials_within(exp, budget - spent, order, len(candidates))
    for t in range(tasks):
        spent += _playing(begin, t) * task_steps(exp, t, clients)
    rounds = len(candidates) + exp.settings.rounds * sum(_playing(begin, t) for t in range(tasks))
    held_out = hold_out_examples(exp.scenario, max(1, tasks), exp.settings.seed)
    return Design(candidates, few, clients, begin, tasks, held_out, spent, rounds)


def range_examples(settings: RunConfig) -> int:
    """The most examples of a client in the range test."""
    return settings.batch_size * max(1, RANGE_STEPS // settings.epochs)


def _playing(begin: int, task: int) -> int:
    """Candidates that play a task."""
    return begin if task == 0 else min(begin, 2)


def _trials_within(
    exp: Experiment, budget: float, order: np.ndarray, candidates: int
) -> tuple[int, int, np.ndarray]:
    """How many candidates play how many tasks with which clients, within so many training steps."""
    last = len(exp.scenario.tasks)
    for begin, tasks, share in DESIGNS:
        begin = min(begin, candidates)
        tasks = min(tasks, last)
        for n in range(len(order), max(1, math.ceil(share * len(order))) - 1, -1):
            if sum(_playing(begin, t) * task_steps(exp, t, order[:n]) for t in range(tasks)) <= budget:
                return begin, tasks, order[:n]
    return 0, 0, order[:0]


def spread(partition: ClientPartition) -> Int[np.ndarray, " n"]:
    """The clients with examples, in an order in which each adds most to the classes of those before it; of
    equal ones, the one with most examples comes first."""
    has = partition.class_examples > 0
    count = partition.count
    left: list[int] = np.flatnonzero(count).tolist()
    order: list[int] = []
    while left:
        missing = ~np.any(has[order], axis=0)
        gain = [(int(np.sum(has[client] & missing)), int(count[client]), -client) for client in left]
        order.append(-max(gain)[2])
        left.remove(order[-1])
    return np.array(order, int)


def hold_out_examples(scenario: Scenario, tasks: int, seed: int) -> Int[np.ndarray, " N"]:
    """The task of each training example of the first tasks that is held out, -1 of the others: a share of
    each class's, at least one of several, and never the last one of a client."""
    held = np.full(len(scenario.train_label), -1)
    rng = np.random.default_rng([seed, PURPOSE])
    earlier = np.zeros(len(held), bool)
    for t, partitions in enumerate(scenario.partitions[:tasks]):
        examples = np.unique(np.concatenate([each.indices for each in partitions]))
        examples = examples[~earlier[examples]]
        earlier[examples] = True
        held[_held_out(scenario.train_label, examples, partitions[0], rng)] = t
    return held


def _held_out(
    label: np.ndarray, examples: np.ndarray, partition: ClientPartition, rng: np.random.Generator
) -> list[int]:
    """Those of a task's examples that are held out."""
    owner = np.full(len(label), -1)
    owner[partition.indices] = np.repeat(np.arange(len(partition.count)), partition.count)
    left = np.append(partition.count, len(label))  # the last: of examples that nobody has in the first round
    share = min(HELD_OUT, MOST_IMAGES / max(1, len(examples)))
    held = []
    for each in np.unique(label[examples]):
        of_class = rng.permutation(examples[label[examples] == each])
        wanted = max(int(share * len(of_class)), int(len(of_class) > 1))
        for index in of_class:
            if wanted and left[owner[index]] > 1:
                left[owner[index]] -= 1
                held.append(int(index))
                wanted -= 1
    return held


def without(
    partition: ClientPartition,
    label: Int[np.ndarray, " N"],
    held_out: Bool[np.ndarray, " N"],
    clients: Int[np.ndarray, " n"],
    most: int | None = None,
) -> ClientPartition:
    """The partition without the held-out examples, and without those of other clients.

    Args:
      partition: of a round.
      label: of all training examples.
      held_out: which of them are held out.
      clients: whose examples stay.
      most: how many examples of each stay, in equal distances; None: all.
    """
    owner = np.repeat(np.arange(len(partition.count)), partition.count)
    stays = ~held_out[partition.indices] & np.isin(owner, clients)
    if most is not None:
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
    """The scenario of these clients, each with at most `most` examples in a round. Its test examples are
    training examples that nobody trains on: those that are held out, and those of other clients."""
    label = scenario.train_label
    held = design.held_out >= 0
    tasks = max(1, design.tasks)

    def part(partition: ClientPartition) -> ClientPartition:
        return without(partition, label, held, clients, most)

    partitions = [[part(each) for each in of_task] for of_task in scenario.partitions[:tasks]]
    whole = tuple(part(each) for each in scenario.whole[:tasks])
    trained = [each.indices for of_task in (*partitions, whole) for each in of_task]
    return scenario._replace(
        partitions=[*partitions, *scenario.partitions[tasks:]],
        whole=(*whole, *scenario.whole[tasks:]),
        test_label=label,
        test_task=_evaluated(scenario, design, np.concatenate(trained), seed),
    )


def _evaluated(scenario: Scenario, design: Design, trained: np.ndarray, seed: int) -> Int[np.ndarray, " N"]:
    """The task of each training example that candidates are evaluated on, -1 of the others: what is held out
    first, then other examples that nobody trains on, up to `MOST_IMAGES` of a task."""
    found = np.full(len(scenario.train_label), -1)
    rng = np.random.default_rng([seed, PURPOSE + 1])
    free = np.ones(len(found), bool)
    free[trained] = False
    for t, of_task in enumerate(scenario.partitions[: max(1, design.tasks)]):
        examples = np.unique(np.concatenate([each.indices for each in of_task]))
        examples = rng.permutation(examples[free[examples]])
        first = np.argsort(design.held_out[examples] < 0, kind="stable")
        found[examples[first][:MOST_IMAGES]] = t
        free[examples] = False
    return found


class AfterTasks(NamedTuple):
    """A candidate that has played some tasks."""

    state: State
    past: tuple[ReplayBuffer, ...]


class _Stage:
    """Plays candidates on the held-out scenario of some clients."""

    def __init__(self, exp: Experiment, clients: np.ndarray, design: Design, short: bool):
        """`short`: a task has one round of a few steps, in which all of the clients take part."""
        settings = exp.settings
        most = None
        if short:
            most = range_examples(settings)
            settings = dataclasses.replace(settings, rounds=1, participation=1.0)
        scenario = scenario_without(exp.scenario, design, clients, most, settings.seed)
        self.exp = exp._replace(settings=settings, scenario=scenario, test=exp.train)
        self.evaluate = make_evaluate(self.exp)
        self.play = make_play(self.exp, Records(), Clock({}))

    def task(
        self, rates: Mapping[str, float], played: AfterTasks, t: int, on_round: Callable[[], None]
    ) -> AfterTasks:
        """The candidate after another task."""
        exp = self.exp._replace(frozen=self.exp.frozen._replace(rates=self.exp.engine.place(as_data(rates))))
        state, past = played
        for r in range(exp.settings.rounds):
            state, kept, _, _ = self.play(exp, state, past, t, r)
            past += () if kept is None else (kept,)
            on_round()
        return AfterTasks(state, past)

    def tried(self, candidate: Candidate, stage: str, after: AfterTasks, t: int) -> Tried:
        """The candidate's A_last after task t."""
        shares = np.array(self.evaluate(self.exp.train, after.state, t, Records()).accuracy, float)
        accuracy = float(np.nanmean(shares)) if np.isfinite(shares).any() else None
        images = int(np.sum(self.exp.scenario.tests_seen(t)))
        return Tried(candidate, stage, t + 1, accuracy, images)


def _trials(exp: Experiment, design: Design, on_round: Callable[[str], None]) -> Iterable[Tried]:
    """Play the range test, then the trials; each trial once it is over."""
    tasks = max(1, design.tasks)
    exp = with_queries(exp, ("train",), range(tasks))
    settings = exp.settings
    start = first_state(exp)
    few = _Stage(exp, design.range_clients, design, short=True)
    found: dict[Candidate, float | None] = {}
    for candidate in design.candidates:
        fresh = AfterTasks(_copied(start), ())
        after = few.task(candidate.rates(settings), fresh, 0, lambda: on_round("range test"))
        tried = few.tried(candidate, "range test", after, 0)
        found[candidate] = tried.accuracy
        yield tried
    if not design.begin:
        return
    stage = _Stage(exp, design.clients, design, short=False)
    running = {candidate: AfterTasks(_copied(start), ()) for candidate in promising(found, design.begin)}
    for t in range(design.tasks):
        stay = promising(found, _playing(design.begin, t))
        running = {candidate: running[candidate] for candidate in stay}
        for candidate in running:
            rates = candidate.rates(settings)
            told = functools.partial(on_round, f"task {t + 1}")
            running[candidate] = stage.task(rates, running[candidate], t, told)
            tried = stage.tried(candidate, "tasks", running[candidate], t)
            found[candidate] = tried.accuracy
            yield tried
        found = {candidate: found[candidate] for candidate in running}


def promising(accuracy: Mapping[Candidate, float | None], count: int) -> list[Candidate]:
    """The candidates that a range test leaves: mini's rates, if they are one and finite, and the best."""
    order = ranked(accuracy, _size)
    mini = [candidate for candidate in order if candidate.scale == "mini"]
    return [*mini, *(candidate for candidate in order if candidate.scale != "mini")][:count]


def _size(candidate: Candidate) -> float:
    """Of equal candidates the one with the smaller factor is chosen, mini's rates before all."""
    return 0.0 if candidate.scale == "mini" else candidate.factor


def _compared(trials: Sequence[Tried]) -> list[Tried]:
    """Those that were compared last."""
    furthest = max(each.tasks for each in trials if each.stage == trials[-1].stage)
    return [each for each in trials if (each.stage, each.tasks) == (trials[-1].stage, furthest)]


def _chosen(trials: Sequence[Tried]) -> Candidate | None:
    """Return the best of the candidates compared last, but mini's rates unless the lead is beyond chance.

    The lead of a share p over a share q, both of n images, has the standard error sqrt(2 m (1 - m) / n) with
    m = (p + q) / 2 where they are equal. It has to be `LEAD` times as large.
    """
    last = {each.candidate: each.accuracy for each in _compared(trials)}
    first = best(last, _size)
    mini = Candidate("mini", 1.0)
    usual = last.get(mini)
    top = None if first is None else last[first]
    if usual is None or top is None or not math.isfinite(usual):
        return first
    mean = (usual + top) / 2
    error = math.sqrt(2 * mean * (1 - mean) / trials[-1].images)
    return first if top > usual + LEAD * error else mini


def _guessing(exp: Experiment, trials: Sequence[Tried]) -> bool:
    """Whether no candidate ended above guessing by more than its standard error."""
    last = _compared(trials)
    guess = 1 / int(np.sum(np.asarray(exp.scenario.tasks[last[0].tasks - 1].seen)))
    error = math.sqrt(guess * (1 - guess) / last[0].images)
    return max(each.accuracy or 0.0 for each in last) <= guess + error


def _copied(state: State) -> State:
    """A copy where it lies, since a round takes the memory of the state that it is given."""
    return jax.tree.map(jnp.copy, state)


def _images_of(exp: Experiment, design: Design, trials: Sequence[Tried]) -> str:
    """The images that decided."""
    partitions = exp.scenario.partitions[: max(1, design.tasks)]
    examples = np.unique(np.concatenate([each.indices for of_task in partitions for each in of_task]))
    share = trials[-1].images / len(examples)
    whose = f"{_first(design)}'s" if design.tasks <= 1 else f"{_first(design)}'"
    return f"{100 * share:.0f} % of the {whose} training images"


def _first(design: Design) -> str:
    return "first task" if design.tasks <= 1 else f"first {design.tasks} tasks"


def _estimate(exp: Experiment, design: Design, total: int) -> str:
    """What the search is going to cost."""
    steps = config.steps_of_task(exp.settings, examples_of_task(exp.scenario))
    return (
        f"learning rates: a client takes about {steps:.0f} steps a task; searching {len(design.candidates)} "
        f"candidates on held-out images of the {_first(design)}, {design.steps} training steps where the run "
        f"has {total} ({100 * design.steps / total:.0f} %)"
    )
