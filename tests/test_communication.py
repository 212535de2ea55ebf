"""Counting what is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fcljax import config
from fcljax.federated.communication import (
    Traffic,
    count_scalars,
    extra_storage,
    num_bytes,
    total_traffic,
    traffic,
)
from fcljax.runs.build import build, placed
from fcljax.runs.features import make_fill
from fcljax.runs.records import Clock, Records
from fcljax.runs.rounds import first_state, make_play_round
from fcljax.runs.traffic import Counted
from fcljax.types import Broadcast, RoundContext, Upload


def shape(*dims: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def test_scalars_are_floating_point_leaves_only_and_bytes_are_everything():
    tree = {
        "w": jnp.ones((2, 3)),
        "h": jnp.ones(4, jnp.bfloat16),
        "index": jnp.arange(5),
        "mask": jnp.ones(7, bool),
    }
    assert count_scalars(tree) == 10
    assert num_bytes(tree) == 24 + 8 + 20 + 7


def test_shapes_count_as_the_arrays_they_stand_for():
    tree = {"w": jnp.ones((2, 3), jnp.float16), "n": np.zeros((4,), np.int8), "s": jnp.float32(1), "p": 0.5}
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree))
    assert count_scalars(tree) == count_scalars(shapes) == 8
    assert num_bytes(tree) == num_bytes(shapes) == 12 + 4 + 4 + 4


def test_empty_trees_and_empty_leaves_count_nothing():
    assert (count_scalars(()), num_bytes(()), count_scalars(jnp.ones((0, 5)))) == (0, 0, 0)


def test_pilora_on_cifar_sends_27648_and_receives_19968_parameters():  # PILoRA section 9
    lora, prototypes = {"A": shape(2, 4, 768), "B": shape(2, 768, 4)}, shape(10, 768)
    upload = Upload(
        mean=lora, gather={"prototype": prototypes, "feature_mean": shape(10, 768)}, weight=shape()
    )
    assert traffic(upload, Broadcast(payload=(lora, prototypes))) == Traffic(
        27_648, 110_592 + 4, 19_968, 79_872
    )


def test_fppl_sends_the_papers_169060_parameters():  # FPPL section 8, CIFAR-100 with T = 10
    mean = {
        "head": {"kernel": shape(768, 100), "bias": shape(100)},
        "coslinear": shape(10, 768),
        "prompt": shape(5, 4, 5, 768),
    }
    upload = Upload(mean=mean, gather={"prototype": shape(10, 768), "present": shape(10, dtype=jnp.bool_)})
    counted = traffic(upload, Broadcast(payload=mean, cached=shape(10, 5, 4, 5, 768)))
    assert counted.upload_scalars == 169_060
    assert counted.upload_bytes == 4 * 169_060 + 10 + 4
    assert counted.download_scalars == 169_060 - 7_680


def test_cached_state_is_storage_and_not_traffic():
    broadcast = Broadcast(
        payload=shape(3), cached={"past": shape(10, 5, 4, 5, 768), "known": shape(10, dtype=jnp.bool_)}
    )
    assert traffic(Upload(), broadcast) == Traffic(0, 4, 3, 12)
    assert extra_storage(broadcast) == {"scalars": 768_000, "bytes": 4 * 768_000 + 10}


def test_sums_are_counted_like_means_and_the_total_scales_with_client_rounds():
    one = traffic(Upload(sum=shape(6), mean=shape(2)), Broadcast(payload=shape(5)))
    assert total_traffic(one, 300) == {
        "upload_scalars": 2400,
        "upload_bytes": 36 * 300,
        "download_scalars": 1500,
        "download_bytes": 6000,
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "method", ["ewc", "pilora", "fppl", "hepco", "fed-talora", "lorm", "dolfin", "fedranpac"]
)
def test_what_clients_cache_changes_by_no_more_than_what_is_counted(method):
    """From one broadcast to the next, what clients cache changes by no more than what is handed over at a
    task's end; where nothing is, nothing changes."""
    values = {"tasks": 3, "clients": 2, "rounds": 2, "epochs": 1, "image_size": 8, "batch_size": 64}
    exp = placed(build(config.from_mapping(method, values, "options")))
    records, state = Records(), first_state(exp)
    handed = Counted.of(exp).handover.download_scalars
    changes, before = [], None
    with Clock(records.seconds) as clock:
        play, fill = make_play_round(exp, records, clock), make_fill(exp)
        for step in range(6):
            t, r = divmod(step, 2)
            exp = fill(exp, range(t, t + 1), clock) if r == 0 else exp
            context = RoundContext.on_host(exp.frozen, exp.scenario.tasks[t], r, r == 1)
            cached = jax.device_get(exp.method.broadcast(context, state.server).cached)
            if before is not None:
                pairs = zip(jax.tree.leaves(before), jax.tree.leaves(cached), strict=True)
                changes.append(sum(int(np.sum(a != b)) for a, b in pairs))
            before, state = cached, play(exp, state, (), step).state
    assert max(changes) <= handed
    assert (max(changes) > 0) == (handed > 0)
