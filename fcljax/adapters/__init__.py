"""The adapters by name: what a method may train inside a network. One table, written out."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fcljax.adapters import coda, dualprompt, full, l2p, linear, lora, pool, prompts, vpt
from fcljax.parts.learner import Adapter
from fcljax.types import Network, Sizes


class AdapterEntry(NamedTuple):
    """How the command line makes an adapter.

    options: frozen dataclass of the adapter's own settings; None values are filled from the method's
      fidelity preset, else from `fidelity`.
    build(options, setting, network) -> Adapter
    attention: does it work inside attention, so that the network must be a ViT?
    """

    summary: str
    options: type
    build: Callable[[Any, Sizes, Network], Adapter]
    fidelity: Mapping[str, Mapping[str, object]]
    attention: bool = True


_NONE: dict[str, dict[str, object]] = {"intended": {}, "paper": {}, "released": {}}

ADAPTERS: dict[str, AdapterEntry] = {
    "linear": AdapterEntry(
        "nothing inside the network: only the classifier trains",
        linear.LinearOptions,
        linear.linear,
        _NONE,
        attention=False,
    ),
    "lora": AdapterEntry(
        "low-rank updates of queries and values, one pair or one per task (PILoRA)",
        lora.LoraOptions,
        lora.lora,
        lora.FIDELITY,
    ),
    "prompts": AdapterEntry(
        "a prompt per task, fused for every image by a gate (FPPL)",
        prompts.PromptOptions,
        prompts.prompts,
        prompts.FIDELITY,
    ),
    "pool": AdapterEntry(
        "a pool of prompts, weighted for every image by their keys (HePCo)",
        pool.PoolOptions,
        pool.pool,
        _NONE,
    ),
    "vpt": AdapterEntry(
        "prompts in the first blocks, the same for all images and tasks (pMAE)",
        vpt.VPTOptions,
        vpt.vpt,
        _NONE,
    ),
    "l2p": AdapterEntry(
        "a pool of prompts, chosen by their keys, that go through the whole network (L2P)",
        l2p.L2POptions,
        l2p.l2p,
        _NONE,
    ),
    "dualprompt": AdapterEntry(
        "prefixes that all tasks share, and one of each task's own (DualPrompt)",
        dualprompt.DualPromptOptions,
        dualprompt.dualprompt,
        dualprompt.FIDELITY,
    ),
    "coda": AdapterEntry(
        "prefixes that are summed from components, weighted for every image (CODA-Prompt)",
        coda.CodaOptions,
        coda.coda,
        coda.FIDELITY,
    ),
    "full": AdapterEntry("the whole network", full.FullOptions, full.full, _NONE, attention=False),
}
