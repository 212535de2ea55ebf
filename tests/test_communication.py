"""Counting what is sent."""

import jax
import jax.numpy as jnp
import numpy as np

from fcljax.federated.communication import Traffic, extra_storage, num_bytes, scalars, total, traffic
from fcljax.types import Broadcast, Upload


def shape(*dims: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def test_scalars_are_floating_point_leaves_only_and_bytes_are_everything():
    tree = {
        "w": jnp.ones((2, 3)),
        "h": jnp.ones(4, jnp.bfloat16),
        "index": jnp.arange(5),
        "mask": jnp.ones(7, bool),
    }
    assert scalars(tree) == 10
    assert num_bytes(tree) == 24 + 8 + 20 + 7


def test_shapes_count_as_the_arrays_they_stand_for():
    tree = {"w": jnp.ones((2, 3), jnp.float16), "n": np.zeros((4,), np.int8), "s": jnp.float32(1), "p": 0.5}
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree))
    assert scalars(tree) == scalars(shapes) == 8
    assert num_bytes(tree) == num_bytes(shapes) == 12 + 4 + 4 + 4


def test_empty_trees_and_empty_leaves_count_nothing():
    assert (scalars(()), num_bytes(()), scalars(jnp.ones((0, 5)))) == (0, 0, 0)


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
    assert total(one, 300) == {
        "upload_scalars": 2400,
        "upload_bytes": 36 * 300,
        "download_scalars": 1500,
        "download_bytes": 6000,
    }
