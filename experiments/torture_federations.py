"""Whole runs of Flower's server with one malicious node of three, for experiments/torture.py.

The nodes are in this process, and answer as Flower's would. The malicious one changes what it says of itself
or what it uploads, in every round or in all but the first. The run must end, and the node must be named or
left out, or what it sent must be a finite parameter, which is left to the aggregation rule.
"""

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from torture_common import Outcome
from torture_uploads import tampers

COMMON = dict(tasks=2, clients=3, rounds=2, epochs=1, image_size=8, batch_size=64)
NETWORK = dict(COMMON, rounds=1, backbone="resnet_micro", generator_steps=2, synthetic_batch=8)
METHODS: dict[str, dict[str, Any]] = {
    "linear": COMMON,
    "afcl": COMMON,
    "fedslca": dict(COMMON, rounds=1, align_epochs=1, align_samples=8),
    "lorm": dict(COMMON, lora_blocks=1, lora_rank=2),
    "c2prompt": dict(
        COMMON, rounds=1, coda_components=4, coda_length=2, coda_blocks=1, compensation_epochs=1
    ),
    "mfcl": dict(NETWORK, generator_batch=8),
    "lander": dict(NETWORK, synthesis_rounds=1, synthesis_batch=8, synthesis_warmup=1),
}
LIAR = 100  # the node of client 0


def installed() -> bool:
    """Whether Flower is there."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def client_of(method: str) -> Any:
    """The client app of a method."""
    from fcljax.bridges.flower import client_app

    return client_app(method, **METHODS[method])


def grid_of(method: str, change: Any) -> Any:
    """Three nodes in this process, of which one changes its answers: change(reply, is_hello)."""
    from flwr.app import Context, RecordDict
    from flwr.serverapp import Grid

    from fcljax.bridges.flower import HELLO

    class Nodes(Grid):
        """Nodes that answer at once."""

        def __init__(self):
            self.contexts = {
                LIAR + i: Context(1, LIAR + i, {"partition-id": i}, RecordDict(), {}) for i in range(3)
            }

        def get_node_ids(self):
            return list(self.contexts)

        def send_and_receive(self, messages, *, timeout=None):
            return [self.answer(message) for message in messages]

        def answer(self, message):
            node = message.metadata.dst_node_id
            reply = client_of(method)(message, self.contexts[node])
            if node == LIAR:
                change(reply.content, message.metadata.message_type == HELLO)
            return reply

        def refuse(self, *_arguments, **_options):
            raise NotImplementedError

        set_run = create_message = push_messages = pull_messages = refuse
        run = property(refuse)

    return Nodes()


def hostile_federation(rng: random.Random, folder: Path, *_: object) -> Outcome:
    """One run."""
    if not installed():
        return Outcome("survived", "Flower is not installed", 0)
    import contextlib
    import io

    from flwr.app import Context, RecordDict

    from fcljax.bridges.flower import server_app
    from fcljax.errors import InputError

    tampers()  # messages are made outside of an app here
    method = rng.choice(list(METHODS))
    lies = Lies(rng)
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        app = server_app(method, str(folder), wait=1.0, timeout=2.0, **METHODS[method])
        try:
            app(grid_of(method, lies), Context(1, 1, {}, RecordDict(), {}))
        except InputError as error:
            one_line = "\n" not in str(error) and lies.of_itself
            return Outcome("survived" if one_line else "other", f"{method}: {lies.what}: {error}")
        except Exception as error:
            return Outcome("other", f"{method}: {lies.what}: {type(error).__name__}: {str(error)[:300]}")
    summary = json.loads((folder / "summary.json").read_text())
    said = "left out" in err.getvalue() or "refused" in err.getvalue() or "warning" in err.getvalue()
    named = bool(summary["rejected_uploads"] or summary["refused_results"]) or said
    finite = np.isfinite(summary["A_last"])
    what = f"{method}: {lies.what}: {summary['rejected_uploads']} rejected, A_last {summary['A_last']:.3f}"
    return Outcome("survived" if finite and (named or lies.is_possible) else "different", what)


class Lies:
    """What the node changes of its answers, and how."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.of_itself = rng.random() < 0.2
        self.first = rng.randrange(2)
        self.seed = rng.getrandbits(32)
        self.answers = 0
        self.what = "nothing yet"
        self.is_possible = False
        """Whether only parameters were changed, to finite ones, or sums of features to possible ones."""

    def __call__(self, content: Any, is_hello: bool) -> None:
        if is_hello:
            if self.of_itself:
                self.hello(content)
            return
        if self.of_itself:
            return
        self.answers += 1
        if self.answers > self.first:
            self.upload(content)

    def hello(self, content: Any) -> None:
        """Change one field of what the node says of itself."""
        rng = random.Random(self.seed)
        record = content["facts"]
        facts = json.loads(str(record["json"]))
        name = rng.choice(list(facts))
        value = rng.choice(([10**6, 10**6], [0, 0], 10**18, -1, "x" * 10**5, None, [], {}, 1.5, [[1]]))
        self.what = f"hello {name} {str(value)[:30]}"
        record["json"] = json.dumps(facts | {name: value})

    def upload(self, content: Any) -> None:
        """Change an array, a metric, the stamp or the records of an answer, in the same way each time."""
        rng = random.Random(self.seed)
        kind = rng.choice(("values", "values", "values", *tampers()))
        if kind != "values":
            self.what = f"{kind} {tampers()[kind](rng, content)}"
            return
        from flwr.app import Array

        record = content["upload"]
        # answers before and after a task have other arrays
        names = [name for name in record if np.prod(record[name].shape)]
        if not names:
            return
        name = rng.choice(names)
        values = np.array(record[name].numpy())
        how = rng.choice(("nan", "inf", "1e30", "-1e30", "1e9", "negative", "1000 times", "noise", "-1"))
        with np.errstate(all="ignore"):
            # arithmetic on an array without axes leaves a scalar
            record[name] = Array(np.asarray(_changed(values, how, self.seed), values.dtype))
        self.what = f"{name} {how}"
        # the sums and what is gathered are checked; parameters and their mean are the rule's
        parameters = how not in ("nan", "inf") and not name.startswith((".sum", ".weight"))
        # features have any sign, and their outer products stay: what `--attack gram` sends
        negated = how == "negative" and name.endswith(".feature")
        self.is_possible = parameters or negated


def _changed(values: np.ndarray, how: str, seed: int) -> Any:
    if how == "negative":
        return -values
    if how == "1000 times":
        return 1000 * values
    if how == "noise":
        return values + 10 * np.abs(values).max() * np.random.default_rng(seed).normal(size=values.shape)
    return np.full_like(values, float(how), dtype=np.float64)
