"""What pMAE's server would do with perfect reconstructions: it trains on the training images themselves.

    python experiments/pmae_real_images.py --out runs/real [options of `fcljax run pmae`]

The same rows are chosen, kept and trained on, but what a client uploads of an image is the image, and
decoding gives it back. No system could do this, since raw images leave their clients: the run says how
much is lost by what the decoder makes of a quarter of the patches.
"""

import sys

import jax.numpy as jnp

from fcljax.commands import running
from fcljax.methods import pmae
from fcljax.models.mae import patchify
from fcljax.runs import loop
from fcljax.types import Autoencoder, Network


def lossless(pair: Autoencoder) -> Autoencoder:
    """An autoencoder whose latent is the image: its rows stand where tokens do, padded to their number."""

    def encode(params, image, keep):
        tokens, flat = keep.shape[1] + 1, image.reshape(len(image), -1)
        room = -flat.shape[1] % tokens
        return jnp.pad(flat, ((0, 0), (0, room))).reshape(len(image), tokens, -1)

    def decode(decoder, latent, restore, prompt):
        side = pair.patch * round(pair.patches**0.5)
        flat = latent.reshape(len(latent), -1)[:, : side * side * 3]
        return patchify(flat.reshape(-1, side, side, 3), pair.patch)

    return pair._replace(encode=encode, decode=decode)


def main(arguments: list[str]) -> None:
    """A run of pMAE with real images."""
    given = running.parse_run("pmae", arguments, "python experiments/pmae_real_images.py", "")
    out = given.pop("out", None) or "runs/real-images"
    cfg = running.settings("pmae", given, running.Paths())
    pair_of, no_restore = pmae.autoencoder_of, pmae.no_restore

    def room_for_images(options, sizes, network: Network, pair: Autoencoder) -> pmae.Restore:
        none = no_restore(options, sizes, network, pair)
        *place, tokens, _ = none.latent.shape
        numbers = 3 * pair.patches * pair.patch**2
        return none._replace(latent=jnp.zeros((*place, tokens, -(-numbers // tokens))))

    # the method has no place for this, on purpose: it is what it exists to avoid
    pmae.autoencoder_of = lambda network: lossless(pair_of(network))
    pmae.no_restore = room_for_images
    summary = loop.run(cfg, out)
    print(f"A_last {100 * summary['A_last']:.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
