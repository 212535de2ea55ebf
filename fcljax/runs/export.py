"""Write what a run trained for other libraries: tensors as safetensors, low-rank updates
and the classifier under PEFT's names, the network under timm's."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fcljax.data.augment import Preprocess
from fcljax.errors import InputError
from fcljax.files import check_folder, temporary_folder, write_text
from fcljax.models.heads import Head
from fcljax.models.vit import Lora, ViTConfig
from fcljax.models.weights.naming import timm_tensors
from fcljax.models.weights.pretrained import save_native
from fcljax.parts.federate import ServerState, learner_of
from fcljax.parts.learner import Learner, Params, network_params
from fcljax.results.repeat import software_of
from fcljax.runs.build import NOTHING, Supplied, make_method
from fcljax.runs.inputs import network_of
from fcljax.runs.loop import final_state
from fcljax.settings import RunConfig
from fcljax.types import PyTree, Task

TRAINED = "parameters.safetensors"
CLASSIFIER = "classifier.safetensors"
NETWORK = "network.safetensors"
PEFT = ("adapter_config.json", "adapter_model.safetensors")
CARD = "README.md"
# Fields of a ViT, with the values at which timm's `VisionTransformer`, as the card's
# lines make it, computes the same.
_PLAIN = {
    "final_norm": True,
    "layer_scale": False,
    "registers": 0,
    "qk_norm": False,
    "pre_norm": False,
    "activation": "gelu",
    "rotary_base": 0.0,
}


class Trained(NamedTuple):
    """What a run ends with, as other libraries see it."""

    config: Any
    """The network's shape."""
    digest: str
    """The sha256 of the file of its weights."""
    network: PyTree
    """The network's parameters, with those that trained."""
    parameters: Params
    """The global model's parameters of all tasks."""
    updates: Mapping[int, Lora] | None
    """Low-rank updates of queries and values by block; None: the adapter adds something else."""
    head: Head | None
    """The classifier as a linear layer; None: it is none."""


def export(
    settings: RunConfig,
    run: str | Path,
    summary: Mapping[str, Any],
    target: str | Path,
    network: bool = False,
    supplied: Supplied = NOTHING,
) -> list[str]:
    """Write a run's global model into a new folder.

    Args:
      settings: of the run.
      run: its directory.
      summary: the content of its summary.json.
      target: the folder to make.
      network: whether the network's parameters are written as well.
      supplied: as of the run.

    Returns:
      The names of the files, and a line for each that the model does not allow.

    Raises:
      InputError: for a folder that exists, or a method whose model is not one of `federate`'s.
    """
    target = Path(target)
    if target.exists() or target.is_symlink():
        raise InputError(f"out: {str(target)!r} exists; give another folder")
    check_folder(target.parent)
    trained, pixels = trained_model(settings, run, supplied)
    with temporary_folder(target) as folder:
        lines = _write(trained, summary, pixels, folder, network)
        folder.rename(target)
    return lines


def trained_model(
    settings: RunConfig, run: str | Path, supplied: Supplied = NOTHING
) -> tuple[Trained, dict[str, Any]]:
    """Return the global model of a run, and the pixel constants of its images.

    Raises:
      InputError: for a method that is not made of parts, or whose clients have personal models.
    """
    exp, state = final_state(settings, run, supplied)
    # Attacks and searched learning rates wrap a method, and `learner_of` cannot see
    # into the wrapper. They change nothing of its model, so the bare method is made
    # again.
    honest = dataclasses.replace(exp.settings, malicious=0)
    method = make_method(honest, exp.sizes, network_of(exp.inputs.backbone, exp.inputs.preprocess))
    learner = learner_of(method)
    if learner is None or not isinstance(state.server, ServerState):
        raise InputError(
            f"method: {settings.method} keeps its model in a form of its own; nearest: Result.save"
        )
    if method.personal:
        raise InputError(
            f"method: clients of {settings.method} have personal models; nearest: Result.client_model"
        )
    task = exp.scenario.tasks[-1]
    params = state.server.params
    trainable = learner.trainable(params, task)
    trained = Trained(
        exp.inputs.backbone.config,
        exp.inputs.backbone.digest,
        network_params(learner.network, learner.adapter, exp.frozen, trainable),
        params,
        _updates(learner, params, trainable, task),
        linear_head(learner, params, trainable, task, exp.inputs.backbone.config),
    )
    pixels = exp.inputs.preprocess
    if not isinstance(pixels, Preprocess):
        return trained, {}
    return trained, {"mean": list(pixels.mean), "std": list(pixels.std)}


def _updates(learner: Learner, params: Params, trainable: Params, task: Task) -> Mapping[int, Lora] | None:
    """Return the low-rank updates of evaluation by block; {} for an adapter that adds
    nothing, None for one that adds something else."""
    adapter = learner.adapter
    if adapter.inject is None:
        return {}
    if adapter.queries:
        # what it adds depends on the image
        return None
    # it adds the same to every image, so a batch of none will do
    no_mask = jnp.zeros(0, bool)
    injection = adapter.inject(params.adapter, trainable.adapter, None, task, False, no_mask)
    # prompts or anything else beside the low-rank updates
    if jax.tree.leaves(injection._replace(lora={})):
        return None
    return injection.lora


def linear_head(learner: Learner, params: Params, trainable: Params, task: Task, config: Any) -> Head | None:
    """Return the classifier as a linear layer of the class token; None if it is none.

    Logits of 0 and of unit vectors give bias and weights. Further features show whether
    the classifier is affine at all.
    """
    width = getattr(config, "width", None)
    rule = learner.classifier.predict or learner.classifier.logits
    if width is None:
        return None

    def logits(feature: jax.Array) -> jax.Array:
        return rule(params.classifier, trainable.classifier, feature, task)

    try:
        bias = logits(jnp.zeros((1, width)))[0]
        weights = logits(jnp.eye(width)) - bias
        probe = jax.random.normal(jax.random.key(0), (8, width))
        expected = logits(probe)
    except TypeError:
        # a classifier of features of another width
        return None
    error = expected - (probe @ weights + bias)
    # NaN, of a classifier that divides by the feature's length, is no linear layer either
    if not jnp.max(jnp.abs(error)) <= 1e-4 * jnp.max(jnp.abs(expected)):
        return None
    return Head(weights, bias)


# ---- files -----------------------------------------------------------------------------


def _write(
    trained: Trained, summary: Mapping[str, Any], pixels: dict[str, Any], folder: Path, network: bool
) -> list[str]:
    """Write all files of an export; return a line for each."""
    lines = [f"{TRAINED}: all parameters of the global model, under dotted names"]
    metadata = {"format": "fcljax", "method": str(summary["method"])}
    save_native(folder / TRAINED, _named(trained.parameters), metadata)
    plain_vit = isinstance(trained.config, ViTConfig) and _is_plain(trained.config)
    if trained.head is not None:
        save_native(folder / CLASSIFIER, _head_tensors(trained.head, ""), metadata)
        lines.append(f"{CLASSIFIER}: weight [classes, width] and bias of the classifier")
    obstacle = _why_not_peft(trained, plain_vit)
    if obstacle is None:
        assert trained.updates is not None and trained.head is not None
        write_text(
            folder / PEFT[0], json.dumps(_peft_config(trained.updates, str(summary["backbone"])), indent=2)
        )
        save_native(folder / PEFT[1], _peft_tensors(trained.updates, trained.head), metadata)
        lines.append(f"{PEFT[1]}: low-rank updates and classifier, for PEFT on timm's network")
    else:
        lines.append(f"no {PEFT[1]}: {obstacle}")
    if network and plain_vit:
        save_native(folder / NETWORK, timm_tensors(trained.network, trained.config), metadata)
        lines.append(f"{NETWORK}: the network under timm's names, at {trained.config.image_size} pixels")
    elif network:
        lines.append(f"no {NETWORK}: timm has no plain VisionTransformer of this shape")
    usage = ""
    if obstacle is None:
        usage = _usage(trained, network)
    write_text(folder / CARD, card(trained, summary, pixels, lines, usage))
    return lines


def _why_not_peft(trained: Trained, plain_vit: bool) -> str | None:
    """Return why PEFT cannot load the model; None if it can."""
    if not plain_vit:
        return "the network is no plain ViT of timm's"
    if trained.updates is None:
        return "the adapter adds more than low-rank updates"
    if not trained.updates:
        return "the run trained no low-rank updates"
    if trained.head is None:
        return "the classifier is no linear layer"
    return None


def _is_plain(config: ViTConfig) -> bool:
    """Return whether timm's `VisionTransformer` computes the network of this shape."""
    return all(getattr(config, name) == value for name, value in _PLAIN.items())


def _named(tree: PyTree) -> dict[str, np.ndarray]:
    """Return the leaves of a tree under dotted names, in float32."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf, np.float32)
        for path, leaf in paths
    }


def _head_tensors(head: Head, prefix: str) -> dict[str, np.ndarray]:
    return {f"{prefix}weight": np.asarray(head.kernel).T, f"{prefix}bias": np.asarray(head.bias)}


def _peft_config(updates: Mapping[int, Lora], backbone: str) -> dict[str, Any]:
    """Return PEFT's description of updates of timm's fused projections."""
    # one update of rank 2 r for the fused projection: r for queries, r for values
    rank = 2 * next(iter(updates.values())).a_q.shape[0]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": backbone,
        "r": rank,
        "lora_alpha": rank,  # alpha / r scales the update; ours is unscaled
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [f"blocks.{block}.attn.qkv" for block in sorted(updates)],
        "modules_to_save": ["head"],
    }


def _peft_tensors(updates: Mapping[int, Lora], head: Head) -> dict[str, np.ndarray]:
    """Return updates and classifier under PEFT's names for timm's network.

    timm has queries, keys and values in one projection [3 width, width]. So the update
    of a block is B A with A = [A_q; A_v], and B_q and B_v in the rows of queries and
    values; the rows of keys are 0.
    """
    tensors = _head_tensors(head, "base_model.model.head.")
    for block, pair in updates.items():
        query = np.asarray(pair.b_q, np.float32)
        value = np.asarray(pair.b_v, np.float32)
        none = np.zeros_like(query)
        rows = [[query, none], [none, none], [none, value]]
        prefix = f"base_model.model.blocks.{block}.attn.qkv."
        tensors[f"{prefix}lora_A.weight"] = np.concatenate([pair.a_q, pair.a_v])
        tensors[f"{prefix}lora_B.weight"] = np.block(rows)
    return tensors


def card(
    trained: Trained, summary: Mapping[str, Any], pixels: dict[str, Any], lines: list[str], usage: str
) -> str:
    """Return the model card: what was trained, on what, with what result, and how to load it."""
    settings = summary["config"]
    facts = {
        "Method": f"`{summary['method']}` ({summary['fidelity']})",
        "Data": f"{summary['dataset']}, {_stream(summary)}",
        "Clients": f"{settings['clients']}, {_partition(settings)}, seed {summary['seed']}",
        "Network": f"{summary['backbone']}, weights {trained.digest[:16]} (sha256)",
        "Images": f"mean {pixels['mean']}, standard deviation {pixels['std']}" if pixels else "other data",
        "Mean accuracy after the last task": f"{100 * summary['A_last']:.1f} %",
        "Mean accuracy over all tasks": f"{100 * summary['A_avg']:.1f} %",
        "Forgetting": _forgetting(summary),
        "Made with": software_of(summary),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    files = "\n".join(f"- {line}" for line in lines)
    classes = "\n".join(f"{i}. {name}" for i, name in enumerate(summary["class_names"]))
    library = "peft" if usage else "fcljax"
    parts = [
        f"---\nlibrary_name: {library}\ntags: [federated-learning, continual-learning, fcljax]\n---",
        f"# {summary['method']} on {summary['dataset']}",
        f"| | |\n|---|---|\n{rows}",
        f"## Files\n\n{files}",
        *([usage] if usage else []),
        f"## Classes\n\nIn the order of the logits:\n\n{classes}",
    ]
    return "\n\n".join(parts) + "\n"


def _partition(settings: Mapping[str, Any]) -> str:
    """Return the partition of a run with the number that decides its skew."""
    partition = settings["partition"]
    if partition == "dirichlet":
        return f"partition `dirichlet` with alpha {settings['alpha']}"
    return f"partition `{partition}`"


def _stream(summary: Mapping[str, Any]) -> str:
    classes = len(summary["class_names"])
    tasks = len(summary["A"])
    if tasks == 1:
        return f"{classes} classes at once"
    return f"{classes} classes in {tasks} tasks"


def _forgetting(summary: Mapping[str, Any]) -> str:
    forgetting = summary["forgetting"]["paper"]
    if forgetting is None:
        return "-"
    return f"{100 * forgetting:.1f} points"


def _usage(trained: Trained, network: bool) -> str:
    """Return the section on loading; `network`: whether its parameters are written."""
    config = trained.config
    assert trained.head is not None
    source = "weights"
    if network:
        source = f'load_file("{NETWORK}")'
    return f"""## Use in PyTorch

`network` is timm's network with the weights that the run started from; `fcljax export --network` writes them.

```python
import peft, timm
from safetensors.torch import load_file

network = timm.models.VisionTransformer(
    img_size={config.image_size}, patch_size={config.patch}, embed_dim={config.width}, depth={config.depth},
    num_heads={config.heads}, mlp_ratio={config.mlp / config.width:g}, num_classes={trained.head.bias.size},
)
network.load_state_dict({source}, strict=False)  # all but the classifier
model = peft.PeftModel.from_pretrained(network, ".").eval()
logits = model(images)  # [N, 3, {config.image_size}, {config.image_size}], normalised as above
```"""
