"""FedJAX's federated averaging, run by an environment that has it: `outside.py`."""

from collections.abc import Callable

import fedjax
import jax
import jax.numpy as jnp
from networks import mean_loss
from served import Served, serve


def way(work: Served) -> Callable[[], dict]:
    """A round of all clients by `fedjax.algorithms.fed_avg`."""

    def gradient(weights, batch, key):
        del key
        mask = jnp.ones(batch["y"].shape, jnp.float32)
        return jax.grad(mean_loss)(weights, batch["x"], batch["y"], mask)

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        gradient,
        fedjax.optimizers.sgd(work.rate),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(work.batch, num_epochs=work.epochs, seed=0),
    )
    clients = [
        (str(number), fedjax.ClientDataset({"x": image, "y": label}), jax.random.PRNGKey(number))
        for number, (image, label) in enumerate(work.clients)
    ]
    start = algorithm.init(jax.tree_util.tree_map(jnp.asarray, work.weights))

    def play() -> dict:
        state, _ = algorithm.apply(start, clients)
        return jax.block_until_ready(state.params)

    return play


if __name__ == "__main__":
    serve(way)
