"""A method that does not keep to the protocol is told so in one line, before anything is computed."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from toys import Lanes, Phase, Upload, View, Weighted, begin, logits, send_mean, toy, train

from fcljax.errors import InputError
from fcljax.federated.check import Example, check_averaged, check_method, describe, name_part
from fcljax.federated.client_loop import slot_bytes
from fcljax.federated.engine import make_engine
from fcljax.federated.schedule import capacities
from fcljax.types import ClientInfo, Program, Round

FROZEN_SHAPE, DATA_SHAPE = jax.eval_shape(lambda: (toys.FROZEN, toys.examples()))
SHAPES = Example(FROZEN_SHAPE, DATA_SHAPE, toys.tasks()[0])
TABLE = [np.zeros(3), np.ones(3)]


def refused(method) -> str:
    """What `make_engine` says of the method; from shapes alone, so nothing can have been computed."""
    partition = toys.partitions(toys.examples())[0]
    rooms = capacities(method, [partition], 1, 8)
    with pytest.raises(InputError) as error:
        make_engine(method, toys.fetch, Lanes(), rooms, SHAPES)
    assert "\n" not in str(error.value)
    return re.sub(r" \(\w+\.py:\d+ \w+(\(\))?\)", "", str(error.value))


def trained(step, **view):
    """The usual toy with another step."""
    return toy(phases=(Phase(View(1, 4, **view), step),))


TWO = View(1, 4, replay=2)


def places(size):
    """Row numbers, or places of a memory, whatever the arguments."""
    return lambda *args: jnp.zeros(size, jnp.int32)


def two_rounds(program):
    return toy(rounds=(Round(program, when="task_end"),))


WRONG = {
    "a metric that is not a Weighted": (
        trained(lambda context, local, batch, key: (local, {"loss": jnp.sum(batch.mask)})),
        "phases[0].step, metric 'loss', returned int32[]; expected a Weighted(total, weight)",
    ),
    "a metric of many numbers": (
        trained(lambda context, local, batch, key: (local, {"loss": Weighted(batch.label, jnp.ones(()))})),
        "phases[0].step, metric 'loss', returned Weighted of (int32[4], float32[]); expected a Weighted of "
        "two scalars",
    ),
    "metrics without names": (
        trained(lambda context, local, batch, key: (local, Weighted(jnp.ones(()), jnp.ones(())))),
        "phases[0].step returned Weighted of (float32[], float32[]); expected a dictionary of metrics as the "
        "second of two",
    ),
    "a step that returns only its local state": (
        trained(lambda context, local, batch, key: local),
        "phases[0].step returned dict of (float32[3]); expected two things, (local, metrics)",
    ),
    "a step that loses a part of its local state": (
        trained(lambda context, local, batch, key: ({}, {})),
        "phases[0].step returned dict of (); expected the structure that it was given, dict of (float32[3])",
    ),
    "a step that changes a type": (
        trained(lambda context, local, batch, key: ({"weight": local["weight"].astype(jnp.bfloat16)}, {})),
        "phases[0].step returned ['weight'] as bfloat16[3]; expected float32[3]",
    ),
    "a finish without client state": (
        toy(finish=lambda context, local, state: Upload(mean=local["weight"])),
        "finish returned Upload of (float32[3], float32[]); expected two things, (Upload, client state)",
    ),
    "a finish without an Upload": (
        toy(finish=lambda context, local, state: (local["weight"], state)),
        "finish returned float32[3]; expected an Upload as the first of two",
    ),
    "a finish with another client state": (
        toy(
            finish=lambda context, local, state: (Upload(), local["weight"]),
            init_client=lambda key, server: jnp.ones(2),
        ),
        "finish returned its value as float32[3]; expected float32[2]",
    ),
    "a weight per row": (
        toy(finish=lambda context, local, state: (Upload(weight=context.client.class_examples), state)),
        "finish, weight, returned int32[4]; expected a scalar",
    ),
    "an integer to be averaged": (
        toy(finish=lambda context, local, state: (Upload(mean={"n": context.client.examples}), state)),
        "finish sends int32[] to be averaged, mean['n'], and averages are taken in float32, which rounds "
        "integers above 2^24; send it as a sum or a gathered report, or as float32",
    ),
    "an arrival that drops the upload": (
        toy(program={"receive": lambda context, upload: upload.mean}),
        "receive returned float32[3]; expected the structure that it was given, Upload of (float32[3], "
        "float32[])",
    ),
    "a server of another structure": (
        toy(server=lambda round_context, server, aggregate, key: ({"weight": aggregate.mean}, {})),
        "server returned dict of (float32[3]); expected the structure that it was given, float32[3]",
    ),
    "a server of another shape": (
        toy(server=lambda round_context, server, aggregate, key: (aggregate.mean[:2], {})),
        "server returned its value as float32[2]; expected float32[3]",
    ),
    "a server of another type": (
        toy(server=lambda round_context, server, aggregate, key: (aggregate.mean.astype(jnp.float16), {})),
        "server returned its value as float16[3]; expected float32[3]",
    ),
    "a server without metrics": (
        toy(server=lambda round_context, server, aggregate, key: aggregate.mean),
        "server returned float32[3]; expected two things, (server, metrics)",
    ),
    "a bare broadcast": (
        toy(broadcast=lambda round_context, server: server),
        "broadcast returned float32[3]; expected a Broadcast(payload, cached)",
    ),
    "a task that begins with another state": (
        toy(begin_task=lambda round_context, server, key: (server, round_context.task.index)),
        "begin_task returned tuple of (float32[3], int32[]); expected the structure that it was given, "
        "float32[3]",
    ),
    "a task that begins with another shape": (
        toy(begin_task=lambda round_context, server, key: server[None]),
        "begin_task returned its value as float32[1,3]; expected float32[3]",
    ),
    "predictions without classes": (
        toy(predict=lambda round_context, server, batch: batch.input[:, 0, 0] @ server),
        "predict returned float32[1]; expected logits of shape [batch, classes], here [1, 4]",
    ),
    "personal predictions of too few classes": (
        toy(predict_client=lambda round_context, server, state, batch: logits(server, batch)[:, :2]),
        "predict_client returned float32[1,2]; expected logits of shape [batch, classes], here [1, 4]",
    ),
    "a round without passes": (
        two_rounds(Program(begin, (), send_mean)),
        "rounds[1].phases is empty; expected at least one pass over the examples",
    ),
    "a wrong function of another round": (
        two_rounds(Program(begin, (Phase(toys.TRAIN, train),), lambda context, local, state: Upload())),
        "rounds[1].finish returned Upload of (float32[]); expected two things, (Upload, client state)",
    ),
    "a step of the protocol before this one": (
        trained(lambda frozen, broadcast, local, batch, task, key: (local, {})),
        "phases[0].step cannot take its 4 arguments: missing a required argument: 'task'",
    ),
    "what is not an array": (
        toy(server=lambda round_context, server, aggregate, key: ("new", {})),
        "server returned something that is not an array: ",
    ),
    "a replay without a buffer": (
        toy(phases=(Phase(TWO, train, places(2)),)),
        "phases[0].replay, View.replay and Program.replay_buffer go together: give all of them or none; here "
        "View.replay is 2",
    ),
    "a view that replays, without a choice": (
        toy(phases=(Phase(TWO, train),), program={"replay_buffer": places(5)}),
        "phases[0].replay, View.replay and Program.replay_buffer go together: give all of them or none; here "
        "View.replay is 2",
    ),
    "a replay of too many examples": (
        toy(phases=(Phase(TWO, train, places(3)),), program={"replay_buffer": places(5)}),
        "phases[0].replay returned int32[3]; expected integers [2]",
    ),
    "a replay buffer of images": (
        toy(program={"replay_buffer": lambda state: jnp.zeros((5, 1, 1, 3))}),
        "replay_buffer returned float32[5,1,1,3]; expected integers [M]",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named_with_what_was_expected(wrong):
    method, message = WRONG[wrong]
    said = refused(method)
    assert said == f"method: {message}" or (message.endswith(": ") and said.startswith(f"method: {message}"))


def table_of(task):
    return jnp.asarray(TABLE[task.index])


def branch(wanted, value):
    return value if wanted else -value


AS_NUMBERS = {
    "step": trained(lambda context, local, batch, key: ({"weight": table_of(context.task)}, {})),
    "start": toy(lambda context, state, key: {"weight": branch(context.task.index > 0, context.payload)}),
    "finish": toy(finish=lambda context, local, state: (Upload(mean=TABLE[int(context.task.index)]), state)),
    "receive": toy(program={"receive": lambda context, upload: upload._replace(mean=table_of(context.task))}),
    "server": toy(server=lambda round_context, server, aggregate, key: (table_of(round_context.task), {})),
    "broadcast": toy(broadcast=lambda round_context, server: toys.Broadcast(table_of(round_context.task))),
    "begin_task": toy(
        begin_task=lambda round_context, server, key: branch(round_context.task.index > 0, server)
    ),
    "predict": toy(predict=lambda round_context, server, batch: logits(table_of(round_context.task), batch)),
    "predict_client": toy(
        predict_client=lambda round_context, *rest: logits(table_of(round_context.task), rest[-1])
    ),
}


@pytest.mark.parametrize("function", AS_NUMBERS)
def test_a_task_is_no_python_number(function):
    """A list indexed by its number, int() of it, or if."""
    said = refused(AS_NUMBERS[function])
    assert re.match(rf"method: (phases\[0\]\.)?{function} uses a traced value as a Python number; ", said)
    assert "task.index" in said and "jnp.where" in said


def my_finish(context, local, state):
    return local["weight"], state


def test_a_wrong_function_is_named_with_its_place():
    with pytest.raises(InputError) as error:
        check_method(toy(finish=functools.partial(my_finish)), toys.fetch, SHAPES)
    line = my_finish.__code__.co_firstlineno
    assert f"method: finish (test_check.py:{line} my_finish()) returned float32[3]" in str(error.value)
    assert describe(lambda: 0).endswith(" lambda") and describe(print) == "builtin_function_or_method"
    assert name_part("server", check_method) == "server"  # of the package itself


@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        ("when", "task_strat", "method: when: unknown value 'task_strat'; did you mean 'task_start'?"),
        ("who", "sample", "method: who: unknown value 'sample'; did you mean 'sampled'?"),
    ],
)
def test_an_unknown_moment_or_group_is_refused_with_the_nearest(field, wrong, message):
    (each,) = toy().rounds
    with pytest.raises(InputError) as error:
        check_method(toy()._replace(rounds=(each._replace(**{field: wrong}),)), toys.fetch, SHAPES)
    assert str(error.value) == message


def test_an_error_of_the_methods_own_is_told_with_its_line():
    def step(context, local, batch, key):
        raise ZeroDivisionError("mine")

    partition = toys.partitions(toys.examples())[0]
    method = trained(step)
    with pytest.raises(
        InputError, match=r"phases\[0\].step: test_check.py:\d+ step\(\): ZeroDivisionError: mine"
    ):
        make_engine(method, toys.fetch, Lanes(), capacities(method, [partition], 1, 8), SHAPES)


@pytest.mark.parametrize("name", toys.TOYS)
def test_the_toys_keep_to_the_protocol(name):
    """What their programs make, as the engine's buffers are shaped by it."""
    method = toys.TOYS[name]()
    found = check_method(method, toys.fetch, SHAPES)
    assert len(found) == len(method.rounds)
    server, (state, *_) = toys.begin_run(method)
    round_context = toys.RoundContext(toys.FROZEN, toys.tasks()[0], np.int32(0), np.bool_(False))
    info = ClientInfo(np.int32(0), np.int32(1), np.ones(4, np.int32), np.int32(0))
    context = toys.ClientContext(
        toys.FROZEN, *method.broadcast(round_context, server), round_context.task, info
    )
    program = method.rounds[0].program
    local = program.start(context, state, toys.KEY)
    upload, _ = program.finish(context, local, state)
    shape_of = lambda tree: jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree))
    assert found[0].local == shape_of(local)
    assert found[0].upload._replace(weight=()) == shape_of(upload._replace(weight=()))


def test_a_weight_may_become_another_type_on_arrival():
    """Rows are whole numbers, half of them are not: weights are held in float32 however they come."""
    halved = toy(program={"receive": lambda context, upload: upload._replace(weight=0.5 * upload.weight)})
    (shapes,) = check_method(halved, toys.fetch, SHAPES)
    assert shapes.upload.weight.dtype == jnp.float32


def kept_by_name(method) -> list[set[str]]:
    """What clients keep after each phase but the last, of a local state that is a dictionary."""
    (shapes,) = check_method(method, toys.fetch, SHAPES)
    names = sorted(shapes.local)
    return [{names[i] for i in kept} for kept in shapes.stored_leaves]


def test_between_phases_clients_keep_what_was_changed_and_is_read_again():
    """Neither the noise, which nobody changes, nor the velocity, which nobody reads again."""
    assert kept_by_name(toys.three_pass()) == [{"weight"}, {"trail"}]
    (shapes,) = check_method(toys.three_pass(), toys.fetch, SHAPES)
    assert slot_bytes(shapes) == 4 + 4 * 3 + 4  # the gathered length, the weights, the trail


def test_what_chooses_the_replay_is_read():
    def choose(context, local, key):
        return local["counted"] + jnp.arange(2)

    def count(context, local, batch, key):
        return {**local, "counted": local["counted"] + jnp.sum(batch.mask, dtype=jnp.int32)}, {}

    def start(context, state, key):
        return {"weight": context.payload, "counted": jnp.zeros((), jnp.int32)}

    phases = (Phase(View(1, 4), count), Phase(View(1, 4, replay=2), train, choose))
    program = {"replay_buffer": lambda state: state}
    method = toy(start, phases, program=program, init_client=lambda key, server: jnp.zeros(3, jnp.int32))
    assert kept_by_name(method) == [{"counted"}]


def test_integers_may_be_averaged_where_float32_has_them_all():
    few = {"a": jnp.zeros(3, jnp.uint16), "b": jnp.zeros((), bool), "c": jnp.zeros((), jnp.int8)}
    check_averaged("finish", jax.eval_shape(lambda: few))
    with pytest.raises(InputError, match=r"sends uint32\[2\] to be averaged, mean\['d'\]"):
        check_averaged("finish", {"d": jnp.zeros(2, jnp.uint32)})
