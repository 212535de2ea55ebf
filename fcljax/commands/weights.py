"""Run the commands about weights: `fcljax weights get`, `convert`, `embed`, `pretrain`
and `pretrain-decoder`."""

import dataclasses
from pathlib import Path

from fcljax.commands.arguments import (
    ProgramOptions,
    Words,
    keep_compiled,
    parse,
    parsed,
    print_rows,
    slug,
)
from fcljax.errors import InputError, Value
from fcljax.options import check_ranges, option, replaced
from fcljax.runs import signals


@dataclasses.dataclass(frozen=True)
class WeightsOptions:
    """Options of `fcljax weights get`."""

    data_dir: str | None = option(None, unset="$FCLJAX_DATA, else ~/.cache/fcljax")
    """Folder of data, where the weights are stored."""


def weights(arguments: list[str]) -> int:
    """Run `fcljax weights get NAME`."""
    about = "Download weights by timm's or the hub's name; resume and verify the download."
    words = Words("get NAME", ("get",), False)
    names, options = parsed(WeightsOptions(), arguments, ["weights"], about, words)
    if len(names) != 2 or names[0] != "get":
        raise InputError(
            f"weights: {' '.join(names) or 'nothing'} given; usage: fcljax weights get NAME, such as "
            "vit_base_patch16_224.augreg_in21k or facebook/dinov2-base"
        )
    from fcljax.models.weights.hub import get_weights

    file = get_weights(names[1], options.data_dir)
    use = f"fcljax run METHOD --backbone {names[1]}"
    print_rows(
        [
            ("file", file.path),
            ("bytes", f"{file.bytes:,}"),
            ("sha256", file.sha256),
            ("use", use),
        ]
    )
    return 0


def convert(arguments: list[str]) -> int:
    """Run `fcljax convert SRC [DST] [options]`."""
    from fcljax.models.weights.convert import ConvertOptions
    from fcljax.models.weights.convert import convert as write

    about = "Convert another library's checkpoint to .safetensors, with its provenance."
    words = Words("SRC [DST]")
    files, options = parsed(ConvertOptions(), arguments, ["convert"], about, words)
    if not 1 <= len(files) <= 2:
        raise InputError(f"convert: {len(files)} files given; usage: fcljax convert SRC [DST] [options]")
    print_rows(write(files[0], files[1] if len(files) == 2 else None, options))
    return 0


def embed(arguments: list[str]) -> int:
    """Run `fcljax embed [options]`."""
    from fcljax.runs.embed import EmbedConfig
    from fcljax.runs.embed import embed as write

    about = "Compute a data set's frozen features, as .npz and for later runs."
    options, cache = _parsed(EmbedConfig(), arguments, "embed", about)
    # for the file's name: `auto` says nothing, the weights' own name does
    backbone = options.backbone
    if backbone == "auto":
        backbone = Path(options.checkpoint or "vit_micro").stem
    keep_compiled(cache)
    summary = write(options, options.out or f"{slug(options.dataset)}-{slug(backbone)}.npz")
    print_rows(list(summary.items()))
    return 0


def pretrain(arguments: list[str]) -> int:
    """Run `fcljax pretrain [options]`."""
    from fcljax.pretraining.encoder import PretrainConfig
    from fcljax.pretraining.encoder import pretrain as train

    about = "Train the packaged micro ViT on rendered glyphs."
    options, cache = _parsed(PretrainConfig(), arguments, "pretrain", about)
    keep_compiled(cache)
    summary = train(options)
    for name, value in summary.items():
        print(f"{name}: {value}")
    return 0


def pretrain_decoder(arguments: list[str]) -> int:
    """Run `fcljax pretrain-decoder [options]`."""
    from fcljax.pretraining.decoder import PretrainDecoderConfig
    from fcljax.pretraining.decoder import pretrain_decoder as train

    about = "Train a masked autoencoder's decoder for a frozen encoder."
    options, cache = _parsed(PretrainDecoderConfig(), arguments, "pretrain-decoder", about)
    keep_compiled(cache)
    # before the first checkpoint there is nothing to resume
    checkpoints = Path(options.out).with_suffix(".checkpoints")
    with signals.advised(lambda: "resume with the same command and --resume" if checkpoints.exists() else ""):
        print_rows(list(train(options).items()))
    return 0


def _parsed(options: Value, arguments: list[str], command: str, about: str) -> tuple[Value, str | None]:
    """Parse and check the options of a command; return them and its `--compile-cache`."""
    groups = {command: options, "files": ProgramOptions()}
    _, values = parse(groups, arguments, [command], about)
    cache = values.pop("compile_cache", None)
    filled = replaced(options, **values)
    check_ranges(filled)
    return filled, cache
