"""The adapters by name: what a method may train inside a network.

The table is text, so that `fcljax list` imports no adapter: the code is loaded by
`find_adapter`.
"""

from typing import Any, NamedTuple

from fcljax.errors import choose
from fcljax.options import load


class AdapterEntry(NamedTuple):
    """How the command line makes an adapter."""

    summary: str
    """One line for `fcljax list`."""
    presets: Any
    """Fidelity -> the adapter's options, or the dataclass of its options, whose defaults
    are the one preset. A method's preset may say otherwise."""
    build: Any
    """(options, sizes: `types.Sizes`, network: `types.Network`) ->
    `parts.learner.Adapter`."""
    attention: bool = True
    """Whether it works inside attention, so that the network must be a ViT."""

    @property
    def options(self) -> type:
        """Return the dataclass of the adapter's options."""
        return type(self.presets["intended"])


ADAPTERS: dict[str, AdapterEntry] = {
    "linear": AdapterEntry(
        "nothing inside the network: only the classifier trains",
        "linear:LinearOptions",
        "linear:linear",
        attention=False,
    ),
    "lora": AdapterEntry(
        "low-rank updates of queries and values, one pair or one per task (PILoRA)",
        "lora:LoraOptions",
        "lora:lora",
    ),
    "prompts": AdapterEntry(
        "a prompt per task, fused per image by a gate (FPPL)", "prompts:PRESETS", "prompts:prompts"
    ),
    "pool": AdapterEntry(
        "a pool of prompts, weighted per image by their keys (HePCo)", "pool:PoolOptions", "pool:pool"
    ),
    "vpt": AdapterEntry(
        "prompts in the first blocks, shared by all images and tasks (pMAE)", "vpt:VPTOptions", "vpt:vpt"
    ),
    "l2p": AdapterEntry(
        "a pool of input prompts, chosen by their keys (L2P)",
        "l2p:PRESETS",
        "l2p:l2p",
    ),
    "dualprompt": AdapterEntry(
        "shared prefixes, and one prefix per task (DualPrompt)",
        "dualprompt:PRESETS",
        "dualprompt:dualprompt",
    ),
    "coda": AdapterEntry(
        "prefixes summed from components, weighted per image (CODA-Prompt)",
        "coda:PRESETS",
        "coda:coda",
    ),
    "full": AdapterEntry("the whole network", "full:FullOptions", "full:full", attention=False),
}


def find_adapter(name: str) -> AdapterEntry:
    """Return the entry of an adapter with its code.

    Raises:
      InputError: for an unknown name.
    """
    entry = ADAPTERS[choose("adapter", name, ADAPTERS)]
    presets = load("fcljax.adapters", entry.presets)
    # an adapter without readings of a paper has only a dataclass of options
    if isinstance(presets, type):
        presets = {"intended": presets()}
    return entry._replace(presets=presets, build=load("fcljax.adapters", entry.build))
