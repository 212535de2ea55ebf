"""How far has an FPPL run's prototype pool fallen behind its model?

    python experiments/prototype_drift.py RUN_DIR

prints one JSON object for the last checkpoint of a finished run.

head: test accuracy of the debiased classifier, per task and in all. pool: of the nearest class mean on the
stored prototypes. fresh: of the nearest class mean on prototypes made anew from all training rows under the
final model, a yardstick that no federated method has. cosine and norms compare the stored class means with
the fresh ones, task by task.
"""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from fcljax.methods.fppl_robust import prototype_mean

from fcljax import config
from fcljax.adapters import ADAPTERS
from fcljax.parts.classifiers import linear
from fcljax.parts.learner import learner
from fcljax.runs import checkpoint, loop
from fcljax.runs.build import build
from fcljax.runs.features import make_features
from fcljax.runs.inputs import network_of
from fcljax.types import Batch


def main(run_dir: str) -> None:
    """Print the measurements of one run."""
    values = config.load_yaml(Path(run_dir) / "config.yaml")
    method = values.pop("method")
    cfg = config.resolve(method, config.from_mapping(method, values, run_dir))
    exp = build(method, cfg)
    with checkpoint.open_checkpoints(Path(run_dir) / "checkpoints", cfg.keep_checkpoints) as manager:
        server = loop.begin(exp, manager, print)[0].server
    network, classes, task = network_of(exp.inputs.backbone), exp.sizes.classes, exp.scenario.tasks[-1]
    adapter = ADAPTERS[cfg.adapter]
    built = adapter.build(config.part(adapter.options, cfg), exp.sizes, network)
    model, params = learner(network, built, linear(network.width, classes)), server.params
    pool, head = server.steps[0], params.classifier

    def feature(frozen, image):
        nothing = jnp.zeros(len(image), jnp.int32)
        batch = Batch(image, nothing, nothing == 0, nothing)
        return model.forward(frozen, params, model.part(params, task), batch, task, False).feature

    of = make_features(feature, exp.read, cfg.eval_batch_size)
    train, test = (np.asarray(of(exp.frozen, split)) for split in (exp.train, exp.test))
    label, target = exp.scenario.train_label, exp.scenario.test_label
    fresh = np.stack([train[label == c].mean(0) for c in range(classes)])
    stored = np.asarray(prototype_mean(pool.vector, pool.present, jnp.ones(cfg.clients, bool))[0])
    tasks = [t.classes[t.classes >= 0] for t in exp.scenario.tasks]

    def accuracy(predicted):
        right = predicted == target
        return {
            "all": round(float(right.mean()), 4),
            "by_task": [round(float(right[np.isin(target, t)].mean()), 3) for t in tasks],
        }

    norm = lambda x: np.linalg.norm(x, axis=-1)
    cosine = (stored * fresh).sum(-1) / (norm(stored) * norm(fresh))
    by_task = lambda x: [round(float(x[t].mean()), 3) for t in tasks]
    result = {
        "head": accuracy(np.argmax(test @ np.asarray(head.kernel) + np.asarray(head.bias), -1)),
        "pool": accuracy(nearest(test, stored)),
        "fresh": accuracy(nearest(test, fresh)),
        "cosine_stored_fresh": by_task(cosine),
        "norm_stored": by_task(norm(stored)),
        "norm_fresh": by_task(norm(fresh)),
        "norm_test": round(float(norm(test).mean()), 2),
    }
    print(json.dumps(result, indent=1))


def nearest(x: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Index of the nearest mean [C, D] for each row [N, D], Euclidean."""
    return np.argmin((means**2).sum(-1) - 2 * x @ means.T, -1)


if __name__ == "__main__":
    main(sys.argv[1])
