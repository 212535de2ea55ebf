"""What a softmax classifier of frozen features reaches at any learning rate, without replay: the table of
docs/results/fit.md.

    python experiments/frozen_softmax.py DATA_FOLDER [SEEDS]

The features are those of `scale_fit.py held-out`: 20 training images of each of 50 classes, and 10 other
training images that evaluate. Clients train a linear classifier on the current task's classes alone, as
`linear` does, and the server averages it: 2 rounds of 3 epochs, batches of 32. Prints Class-IL and Task-IL
accuracy in %, means over seeds of the class order and the partition.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scale_fit import STREAMS, _built, _given

from fcljax import config
from fcljax.runs.features import frozen_features

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0)
ROUNDS = 2
EPOCHS = 3
BATCH = 32


class Images(NamedTuple):
    """Frozen features with a constant 1 appended, and labels."""

    train: np.ndarray
    train_label: np.ndarray
    test: np.ndarray
    test_label: np.ndarray


def images_of(folder: Path) -> Images:
    """Compute the features of the stream `held-out`."""
    stream = STREAMS["held-out"]
    given = _given(folder, 2023, stream) | {"fidelity": "intended", "scale": "mini"}
    exp = _built(config.from_mapping("linear", given, "options"), stream, folder)
    compute = frozen_features(exp.inputs, 50)

    def features(split, label: np.ndarray) -> np.ndarray:
        return np.c_[compute(exp.frozen, split, np.arange(len(label))), np.ones(len(label))]

    train_label = np.asarray(exp.scenario.train_label)
    test_label = np.asarray(exp.scenario.test_label)
    return Images(features(exp.train, train_label), train_label, features(exp.test, test_label), test_label)


def trained(
    images: Images,
    tasks: np.ndarray,
    clients: int,
    alpha: float,
    optimiser: str,
    rate: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return the averaged classifier after all tasks, (C, D).

    Args:
      tasks: classes of each task, (T, classes of a task).
      alpha: of the Dirichlet distribution of a class's images over clients.
    """
    weight = np.zeros((tasks.size, images.train.shape[1]))
    for classes in tasks:
        members: list[list[int]] = [[] for _ in range(clients)]
        for class_id in classes:
            share = rng.dirichlet(np.full(clients, alpha))
            for index in np.flatnonzero(images.train_label == class_id):
                members[rng.choice(clients, p=share)].append(int(index))
        with_images = [np.array(indices) for indices in members if indices]
        for _ in range(ROUNDS):
            models = [client_model(images, weight, classes, own, optimiser, rate, rng) for own in with_images]
            weight = np.average(models, axis=0, weights=[len(own) for own in with_images])
    return weight


def client_model(
    images: Images,
    weight: np.ndarray,
    classes: np.ndarray,
    own: np.ndarray,
    optimiser: str,
    rate: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return a client's classifier after a round: Adam, or SGD with momentum 0.9."""
    first = np.zeros_like(weight)
    second = np.zeros_like(weight)
    count = 0
    for _ in range(EPOCHS):
        order = rng.permutation(own)
        for batch in np.split(order, range(BATCH, len(order), BATCH)):
            logits = images.train[batch] @ weight[classes].T
            probability = np.exp(logits - logits.max(axis=1, keepdims=True))
            probability /= probability.sum(axis=1, keepdims=True)
            error = probability - (images.train_label[batch][:, None] == classes)
            gradient = np.zeros_like(weight)
            gradient[classes] = error.T @ images.train[batch] / len(batch)
            count += 1
            if optimiser == "sgd":
                first = 0.9 * first + gradient
                weight = weight - rate * first
                continue
            first = 0.9 * first + 0.1 * gradient
            second = 0.999 * second + 0.001 * gradient**2
            scale = np.sqrt(second / (1 - 0.999**count)) + 1e-8
            weight = weight - rate * first / (1 - 0.9**count) / scale
    return weight


def accuracies(images: Images, tasks: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Return Class-IL and Task-IL accuracy."""
    logits = images.test @ weight.T
    task_of_class = np.argsort(tasks.ravel()) // tasks.shape[1]
    in_task = task_of_class == task_of_class[images.test_label][:, None]
    among_all = logits.argmax(axis=1) == images.test_label
    within = np.where(in_task, logits, -np.inf).argmax(axis=1) == images.test_label
    return float(among_all.mean()), float(within.mean())


def class_means(images: Images) -> np.ndarray:
    """Return the classifier of cosine similarity to class means: unit rows."""
    count = images.train_label.max() + 1
    means = np.stack([images.train[images.train_label == each].mean(axis=0) for each in range(count)])
    means[:, -1] = 0
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def main(folder: str, seeds: str = "4") -> None:
    """Print the table."""
    images = images_of(Path(folder))
    print("| tasks | clients | optimiser | " + " | ".join(f"{rate:g}" for rate in RATES) + " |")
    for count in (10, 5):
        orders = [
            np.random.default_rng(seed).permutation(50).reshape(count, -1) for seed in range(int(seeds))
        ]
        means = [accuracies(images, tasks, class_means(images)) for tasks in orders]
        print(f"{count} tasks, class means: {_cell(means)}")
        for clients, alpha in ((1, 1.0), (5, 1000.0), (5, 0.5)):
            for optimiser in ("adam", "sgd"):
                cells = []
                for rate in RATES:
                    rngs = map(np.random.default_rng, range(len(orders)))
                    weights = [
                        trained(images, tasks, clients, alpha, optimiser, rate, rng)
                        for tasks, rng in zip(orders, rngs, strict=True)
                    ]
                    cells.append(
                        _cell([accuracies(images, *both) for both in zip(orders, weights, strict=True)])
                    )
                print(
                    f"| {count} | {clients}, alpha {alpha:g} | {optimiser} | {' | '.join(cells)} |",
                    flush=True,
                )


def _cell(found: list[tuple[float, float]]) -> str:
    class_il, task_il = 100 * np.mean(found, axis=0)
    return f"{class_il:.1f} / {task_il:.1f}"


if __name__ == "__main__":
    main(*sys.argv[1:])
