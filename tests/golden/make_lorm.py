"""Makes lorm.npz, which tests/test_lorm.py compares with: random factors and Gram matrices, and what LoRM's
authors make of them over clients and over tasks.

Run it where torch is installed (2.14.1 made the file), on a clone of aimagelab/fed-mammoth (commit 09a9508):

    python tests/golden/make_lorm.py CLONE [folder]

Of the clone only _models/lorm.py is loaded: what it imports beside torch has no part in its merges.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

D, RANK, CLASSES, CLIENTS, TOKENS = 6, 2, 4, 3, 40
LAYER, HEAD = "block.weight", "head.weight"


def load(clone: Path) -> type:
    """The class LoRM of a clone."""
    register = SimpleNamespace(register_model=lambda name: lambda cls: cls)
    one, other = type("Lora", (), {}), type("RegMean", (), {})
    stubs = {
        "_models": register,
        "_models._utils": SimpleNamespace(BaseModel=nn.Module),
        "_networks.vit": SimpleNamespace(VisionTransformer=nn.Module),
        "utils.tools": SimpleNamespace(str_to_bool=bool, compute_fisher_expectation_fabric=None),
        "_models.lora": SimpleNamespace(Lora=one, merge_AB=None, zero_pad=None),
        "_models.regmean": SimpleNamespace(RegMean=other),
        "_models.lora_pre": SimpleNamespace(Lora=one),
        "tqdm": SimpleNamespace(tqdm=None),
        "transformers": mock.MagicMock(),
    }
    for name in ("_networks", "utils"):
        stubs[name] = ModuleType(name)
    with mock.patch.dict(sys.modules, stubs):
        spec = importlib.util.spec_from_file_location("lorm", clone / "_models" / "lorm.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.LoRM


class Network(nn.Module):
    """A layer and a classifier."""

    def __init__(self, head):
        super().__init__()
        self.block = nn.Linear(D, D, bias=False)
        self.head = nn.Linear(D, CLASSES, bias=False)
        self.head.weight.data = torch.tensor(head)
        nn.init.zeros_(self.block.weight)


def server_of(given, trains):
    """The server before a round in which one factor trains."""
    nothing = lambda *arguments, **options: None
    return SimpleNamespace(
        avg_type="weighted",
        regmean_all=True,
        reg_dtype_64=True,
        gram_dtype=torch.float32,
        device="cpu",
        cl_merge="",
        cur_task=1,
        cur_train_matrix=trains,
        lora_keys=[LAYER],
        head_keys=[HEAD],
        gram_modules=["block", "head"],
        middle_names={LAYER: "block", HEAD: "head"},
        network=Network(given["head"]),
        cur_A={LAYER: torch.tensor(given["a"])},
        cur_B={LAYER: torch.tensor(given["b"])},
        optimization_dict={},
        to=nothing,
        detach=nothing,
        set_optimization=nothing,
    )


def merged(lorm, given, grams, trains):
    """The factor of a round, and the classifier."""
    server = server_of(given, trains)
    a_of = given["a_of"] if trains == "A" else [given["a"]] * CLIENTS
    b_of = given["b_of"] if trains == "B" else [given["b"]] * CLIENTS
    sent = [
        {
            "num_train_samples": TOKENS,
            "cur_A": {LAYER: torch.tensor(a_of[i])},
            "cur_B": {LAYER: torch.tensor(b_of[i])},
            "grams": {"block": torch.tensor(grams[i]), "head": torch.tensor(given["head_gram"][i])},
            "state_dict": {HEAD: torch.tensor(given["head_of"][i])},
        }
        for i in range(CLIENTS)
    ]
    memory = SimpleNamespace(total_memory=1)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda device: memory):
        lorm.end_round_server(server, sent)
    factor = server.cur_A if trains == "A" else server.cur_B
    return factor[LAYER].detach().numpy(), server.network.head.weight.detach().numpy()


def over_tasks(lorm, given, grams):
    """The update of the layer after as many tasks as there are clients: one client in each."""
    server = server_of(given, "B")
    for task in range(CLIENTS):
        server.cur_task = task
        # in float64, as the authors' rounds are
        server.cur_A = {LAYER: torch.tensor(given["a_of"][task]).double()}
        server.cur_B = {LAYER: torch.tensor(given["b_of"][task]).double()}
        lorm.end_task_server(server, [{"grams": {"block": torch.tensor(grams[task]).double()}}])
    return server.optimization_dict[LAYER].detach().numpy()


def main(clone: Path, folder: Path) -> None:
    """Write lorm.npz."""
    lorm = load(clone)
    rng = np.random.default_rng(0)
    x, f = rng.normal(size=(2, CLIENTS, TOKENS, D)) * rng.uniform(0.5, 2, size=(2, CLIENTS, 1, D))
    gram, head_gram = x.transpose(0, 2, 1) @ x, f.transpose(0, 2, 1) @ f
    shapes = {"a": (RANK, D), "b": (D, RANK), "head": (CLASSES, D)}
    shapes |= {f"{name}_of": (CLIENTS, *shape) for name, shape in shapes.items()}
    given = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    off_diagonal = 0.5 + 0.5 * np.eye(D)
    given |= {"gram": gram.astype(np.float32), "head_gram": (off_diagonal * head_gram).astype(np.float32)}
    made = {}
    parts = {"full": given["gram"], "diagonal": given["gram"] * np.eye(D, dtype=np.float32)}
    for part, grams in parts.items():
        made[f"{part}/a"], _ = merged(lorm, given, grams, "A")
        made[f"{part}/b"], made["kernel"] = merged(lorm, given, grams, "B")
        made[f"{part}/tasks"] = over_tasks(lorm, given, grams)
    arrays: dict[str, Any] = given | made
    np.savez_compressed(folder / "lorm.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parent))
