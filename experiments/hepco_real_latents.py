"""What HePCo's server would do with perfect latents: it distils on real features of training images.

    python experiments/hepco_real_latents.py --out runs/real [options of `fcljax run hepco`]

Latents of a class are frozen features of training images of that class, drawn anew for every batch, in the
place of those that the generators make. No server could do this, having no images: the run says how much
is lost by what the generators make.
"""

import sys

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fcljax.commands import running
from fcljax.methods.hepco import hepco
from fcljax.runs import loop
from fcljax.runs.build import build
from fcljax.runs.features import frozen_features


def real_latents(feature: Float[Array, "N D"], label: Int[Array, " N"], classes: int):
    """A `draw_latents` of real features; rows with label -1 belong to no class of the run."""
    present = label >= 0
    rows_of = jnp.bincount(jnp.where(present, label, classes), length=classes + 1)

    def draw(options, shape, rows, past, task, new, older, key: PRNGKeyArray) -> hepco.Composite:
        del shape, new, older

        def drawn(key: PRNGKeyArray, count: int, rows: Float[Array, " C"]) -> hepco.Latents:
            """Each class as often as it occurs, each of its images equally often."""
            odds = jnp.where(rows > 0, jnp.log(jnp.maximum(rows, 1e-12)), -jnp.inf)
            of_row = odds[jnp.maximum(label, 0)] - jnp.log(jnp.maximum(rows_of[jnp.maximum(label, 0)], 1))
            chosen = jax.random.categorical(key, jnp.where(present, of_row, -jnp.inf), shape=(count,))
            return hepco.Latents(feature[chosen], label[chosen])

        first, second = jax.random.split(key)
        replay = 0 if options.wo_previous else int(options.latent_batch * options.replay_ratio)
        old = drawn(second, replay, past.rows * task.old) if replay else None
        return hepco.Composite(drawn(first, options.latent_batch, rows), old)

    return draw


def main(arguments: list[str]) -> None:
    """A run of HePCo with real latents."""
    given = running.parse_run("hepco", arguments, "python experiments/hepco_real_latents.py", "")
    out = given.pop("out", None) or "runs/real-latents"
    cfg = running.settings("hepco", given, running.Paths())
    exp = build(cfg)
    feature = frozen_features(exp.inputs, cfg.eval_batch_size)(exp.frozen, exp.train)
    label = jnp.asarray(exp.scenario.train_label)
    # the method has no place for this, on purpose: a server that could draw these would need no generators
    hepco.draw_latents = real_latents(jnp.asarray(feature), label, exp.sizes.classes)
    summary = loop.run(cfg, out)
    print(f"A_last {100 * summary['A_last']:.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
