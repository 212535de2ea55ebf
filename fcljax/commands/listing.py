"""`fcljax list`: what can be named on the command line."""

from rich.console import Console
from rich.table import Table

from fcljax.commands.arguments import parse
from fcljax.terminal import add_row


def list_(arguments: list[str]) -> int:
    """`fcljax list`: what can be named on the command line, and what does not go together."""
    parse({}, arguments, ["list"], "What can be named, and what does not go together.")

    from fcljax.adapters import ADAPTERS
    from fcljax.data.files.sources import DATASETS
    from fcljax.data.geometry import PIPELINES
    from fcljax.methods import METHODS
    from fcljax.models.shapes import CONVNETS, PACKAGED, VITS
    from fcljax.settings import ATTACKS

    backbones = {
        name: f"{vit.depth} blocks, width {vit.width}, patch {vit.patch}, {vit.image_size} px; "
        + ("weights are packaged" if name in PACKAGED else "needs --checkpoint")
        for name, vit in VITS.items()
    } | {
        name: f"features of width {each.width}, {each.image_size} px; random values without --checkpoint"
        for name, each in CONVNETS.items()
    }
    backbones["NAME.TAG or OWNER/NAME"] = "weights of timm or the hub; `fcljax weights get` downloads them"
    methods = {name: f"{entry.summary}; adapter {entry.adapter}" for name, entry in METHODS.items()}
    adapters = {name: entry.summary for name, entry in ADAPTERS.items()}
    excluded = {
        f"{name} + {adapter}": why
        for name, entry in METHODS.items()
        for adapter, why in entry.excludes.items()
    }
    merging = {f"{name} + --aggregator": f"{e.merges}: mean alone" for name, e in METHODS.items() if e.merges}
    listed = {
        "method": methods,
        "adapter": adapters,
        "data set": DATASETS,
        "backbone": backbones,
        "pipeline": PIPELINES,
        "attack": ATTACKS,
        "cannot work": excluded | merging,
    }
    table = Table("kind", "name", "what it is")
    for kind, rows in listed.items():
        for name, text in rows.items():
            add_row(table, kind, name, text)
        table.add_section()
    Console().print(table)
    return 0
