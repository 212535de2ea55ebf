"""The papers' client algorithms as plain loops in torch, on a ViT that takes fcljax's weights.

Written from what the specifications say of the authors' releases. Each algorithm runs in up to four ways:

  released  FPPL: prompts are tokens of whole blocks, whose outputs are dropped; the backbone is not frozen,
            so the gradients of all its weights are computed, and nobody reads them; the contrastive loss
            goes image by image. PILoRA: the model is copied for each client, an unused head is computed,
            features go to numpy image by image
  frozen    the same without the gradients of weights that nobody reads
  lean      besides: prompts are keys and values alone, the last block works for the class token alone, fused
            attention, losses of whole batches

Images are augmented a batch at a time (grid_sample without antialiasing), which costs less than the releases'
transforms of single images.
"""

import copy
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcljax.models.vit import ViTConfig
from fcljax.types import PyTree
from peers.game import Game, rows_of
from peers.prompted import (
    CLASSES,
    DECAY,
    L1,
    LORA_RATE,
    ORTHOGONALITY,
    PL,
    TASK_CLASSES,
    TASKS,
    TEMPERATURE,
    Work,
    test_split,
)

How = Literal["released", "frozen", "lean", "compiled"]
TASK = 1


def is_lean(how: How) -> bool:
    """Does nothing that nobody reads?"""
    return how in ("lean", "compiled")


def tensor(x: Any) -> Tensor:
    """A copy of an array, float32 if it is of a smaller float type."""
    array = np.asarray(x)
    return torch.from_numpy(np.array(array, np.float32 if array.dtype.itemsize == 2 else array.dtype))


# ---- the network -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm block. The first `queries` tokens come out; `extra` are more keys and values; `pair` are
    low-rank updates (A_q, B_q, A_v, B_v)."""

    def __init__(self, vit: ViTConfig, fused: bool):
        super().__init__()
        d = vit.width
        self.heads = vit.heads
        self.fused = fused
        self.norm1 = nn.LayerNorm(d, vit.epsilon)
        self.norm2 = nn.LayerNorm(d, vit.epsilon)
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.fc1 = nn.Linear(d, vit.mlp)
        self.fc2 = nn.Linear(vit.mlp, d)

    def forward(self, x: Tensor, extra: Tensor | None = None, queries: int | None = None, pair: Any = None):
        queries = x.shape[1] if queries is None else queries
        h = self.norm1(x)
        if extra is None and queries == x.shape[1]:
            q, k, v = self.qkv(h).chunk(3, -1)
        else:
            d = x.shape[-1]
            keys = h if extra is None else torch.cat([h, self.norm1(extra)], 1)
            q = F.linear(h[:, :queries], self.qkv.weight[:d], self.qkv.bias[:d])
            k, v = F.linear(keys, self.qkv.weight[d:], self.qkv.bias[d:]).chunk(2, -1)
        if pair is not None:
            q = q + F.linear(F.linear(h[:, :queries], pair[0]), pair[1])
            v = v + F.linear(F.linear(h, pair[2]), pair[3])
        x = x[:, :queries] + self.proj(self.attend(q, k, v))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Softmax attention of all heads."""
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        score = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        return (score @ v).transpose(1, 2).flatten(2)


class ViT(nn.Module):
    """The class token of images [B, S, S, 3] after the final norm."""

    def __init__(self, vit: ViTConfig, how: How):
        super().__init__()
        self.config = vit
        self.lean = is_lean(how)
        self.patch = nn.Linear(vit.patch**2 * 3, vit.width)
        self.cls = nn.Parameter(torch.zeros(vit.width))
        self.pos = nn.Parameter(torch.zeros(1 + vit.grid**2, vit.width))
        self.blocks = nn.ModuleList([Block(vit, self.lean) for _ in range(vit.depth)])
        self.norm = nn.LayerNorm(vit.width, vit.epsilon)
        self.requires_grad_(how == "released")

    def forward(self, image: Tensor, prompt: Tensor | None = None, pair: Any = None) -> Tensor:
        b = len(image)
        g = self.config.grid
        p = self.config.patch
        patches = image.view(b, g, p, g, p, 3).transpose(2, 3).reshape(b, g * g, -1)
        x = torch.cat([self.cls.expand(b, 1, -1), self.patch(patches)], 1) + self.pos
        tokens = x.shape[1]
        for i, block in enumerate(self.blocks):
            own = prompt[:, i] if prompt is not None and i < prompt.shape[1] else None
            last = 1 if self.lean and i == len(self.blocks) - 1 else None
            if own is not None and not self.lean:
                x = block(torch.cat([x, own], 1))[:, :tokens]
            else:
                x = block(x, own, last, pair if i == 0 else None)
        return self.norm(x[:, 0])


@torch.no_grad()
def load(module: ViT, params: PyTree) -> ViT:
    """fcljax's weights in torch's layout."""

    def fill(target: nn.Module, source: PyTree) -> None:
        matrix = isinstance(target, nn.Linear)
        weight = tensor(source["kernel" if matrix else "scale"])
        target.weight.copy_(weight.T if matrix else weight)
        target.bias.copy_(tensor(source["bias"]))

    fill(module.patch, params["patch"])
    fill(module.norm, params["norm"])
    module.cls.copy_(tensor(params["cls"]))
    module.pos.copy_(tensor(params["pos"]))
    for i, block in enumerate(module.blocks):
        source = params[f"block_{i:02d}"]
        for name in ("norm1", "norm2", "fc1", "fc2"):
            fill(getattr(block, name), source[name])
        fill(block.qkv, source["attn"]["qkv"])
        fill(block.proj, source["attn"]["proj"])
    return module


# ---- images ------------------------------------------------------------------------------------------------


def augmented(work: Work, image: Tensor, rng: np.random.Generator) -> Tensor:
    """The training view of grey levels [B, S, S, 3]: FPPL crops 5 to 100 % of the area and flips, PILoRA
    flips and changes the brightness."""
    if not work.augment:
        return clean(work, image)
    count = len(image)
    flip = np.where(rng.random(len(image)) < 0.5, -1.0, 1.0)
    x = image.float().div_(255)
    on = lambda values: torch.from_numpy(np.asarray(values, np.float32)).to(image.device)
    if work.method == "pilora":
        factor = on(1 + (2 * rng.random(count) - 1) * 63 / 255)[:, None, None, None]
        x = torch.where(on(flip)[:, None, None, None] < 0, x.flip(2), x)
        return normal(work, (x * factor).clamp_(0, 1))
    area = rng.uniform(0.05, 1.0, count)
    ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3), count))
    wide, high = (np.minimum(1, np.sqrt(area * r)) for r in (ratio, 1 / ratio))
    right, down = ((2 * rng.random(count) - 1) * (1 - side) for side in (wide, high))
    zero = np.zeros(count)
    theta = on(np.stack([flip * wide, zero, right, zero, high, down], 1).reshape(count, 2, 3))
    grid = F.affine_grid(theta, [count, 3, *x.shape[1:3]], align_corners=False)
    seen = F.grid_sample(x.permute(0, 3, 1, 2), grid, padding_mode="reflection", align_corners=False)
    return normal(work, seen.permute(0, 2, 3, 1))


def clean(work: Work, image: Tensor) -> Tensor:
    """The clean view of images that have the network's size."""
    return normal(work, image.float().div_(255))


def normal(work: Work, x: Tensor) -> Tensor:
    """Pixels in the range that the method gives its network."""
    constants = work.preprocess.mean, work.preprocess.std
    mean, std = (torch.tensor(values, device=x.device) for values in constants)
    return ((x - mean) / std).contiguous()


class Data(NamedTuple):
    """Images as grey levels, and their classes."""

    input: Tensor
    label: Tensor


# ---- FPPL --------------------------------------------------------------------------------------------------


class Fppl(nn.Module):
    """FPPL's model: prompts of all tasks are one parameter, as in the release."""

    def __init__(self, work: Work, game: Game, how: How):
        super().__init__()
        params = game.server.params
        self.how = how
        self.vit = load(ViT(work.vit, how), game.frozen.network)
        self.prompt = nn.Parameter(tensor(params.adapter.prompt))
        self.psi, self.sigma = (nn.Parameter(tensor(x)) for x in params.adapter.gate)
        self.fc = nn.Linear(work.vit.width, CLASSES)
        with torch.no_grad():
            self.fc.weight.copy_(tensor(params.classifier.kernel).T)
            self.fc.bias.copy_(tensor(params.classifier.bias))

    def forward(self, image: Tensor, train: bool = False) -> Tensor:
        with torch.no_grad():
            query = self.vit(image)
        score = self.sigma * F.normalize(query, dim=-1) @ F.normalize(self.psi, dim=-1).T
        score = score.masked_fill(torch.arange(TASKS, device=image.device) > TASK, -torch.inf)
        prompts = self.prompt
        if train:
            kept = [p if i == TASK else p.detach().clone() for i, p in enumerate(prompts)]
            prompts = torch.stack(kept)
        fused = torch.einsum("bt,tmld->bmld", score.softmax(-1), prompts)
        return self.vit(image, fused)

    def trained(self) -> dict[str, Tensor]:
        """What the optimiser gets, and what is sent."""
        return {name: x for name, x in self.named_parameters() if not name.startswith("vit")}


def fppl_loss(net: Fppl, image: Tensor, label: Tensor, prototype: Tensor) -> Tensor:
    """Cross-entropy over the task's classes, and the pull to the global prototypes [TASK_CLASSES, width]."""
    feature = net(image, train=True)
    own = label - TASK_CLASSES
    logits = net.fc(feature)
    logits[:, :TASK_CLASSES] = -torch.inf
    loss = F.cross_entropy(logits, label)
    if is_lean(net.how):
        similarity = F.normalize(feature, dim=-1) @ F.normalize(prototype, dim=-1).T
        return loss + F.cross_entropy(similarity / TEMPERATURE, own)
    pull = 0.0
    for one, mine in zip(feature, own.tolist(), strict=True):
        close = torch.exp(F.cosine_similarity(one[None], prototype, dim=1) / TEMPERATURE)
        pull = pull - torch.log(close[mine] / close.sum())
    return loss + pull / len(label)


def fppl_round(work: Work, game: Game, how: How, where: str = "cpu") -> Callable[[], dict[str, Tensor]]:
    """A round of all clients -> the averaged parameters."""
    net = on_device(Fppl(work, game, how), where)
    data = data_on(game, where)
    prototype = tensor(game.server.rules[0].vector).mean(0)[TASK_CLASSES:].to(where)
    whole = copy.deepcopy(net.state_dict()) if not is_lean(how) else copy.deepcopy(net.trained())

    def play(client: int) -> dict[str, Tensor]:
        rows = torch.from_numpy(rows_of(game.partition, client)).long()
        rng = np.random.default_rng(client)
        net.load_state_dict(whole, strict=not is_lean(how))
        optimiser = torch.optim.Adam(net.trained().values(), lr=work.rate)
        for _ in range(work.epochs):
            for some in rows[torch.from_numpy(rng.permutation(len(rows)))].split(work.batch):
                image = data.input[some]
                label = data.label[some]
                loss = fppl_loss(net, augmented(work, image, rng), label, prototype)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        with torch.no_grad():
            parts = [net(augmented(work, data.input[some], rng)) for some in rows.split(work.batch)]
        class_means(torch.cat(parts), data.label[rows])
        return copy.deepcopy({name: x.detach() for name, x in net.trained().items()})

    return lambda: averaged(work, play, where)


def class_means(feature: Tensor, label: Tensor) -> dict[int, np.ndarray]:
    """The prototypes that go up."""
    return {c: feature[label == c].mean(0).cpu().numpy() for c in label.unique().tolist()}


def fppl_predict(work: Work, game: Game, how: How, where: str = "cpu") -> Callable[[], Tensor]:
    """The classes of all test images."""
    net = on_device(Fppl(work, game, how), where)
    images = tensor(test_split(work).input).to(where)
    found = lambda image: net.fc(net(clean(work, image))).argmax(-1)
    return lambda: predicted(work, found, images)


# ---- PILoRA ------------------------------------------------------------------------------------------------


class Pilora(nn.Module):
    """PILoRA's model: a pair for each task and a parameter for each class, as in the release."""

    def __init__(self, work: Work, game: Game, how: How):
        super().__init__()
        params = game.server.params
        frozen: How = "frozen" if how == "released" else how
        self.how = how
        self.vit = load(ViT(work.vit, frozen), game.frozen.network)
        of_task = lambda task: nn.ParameterList([tensor(leaf[task, 0]) for leaf in params.adapter])
        self.pairs = nn.ModuleList([of_task(task) for task in range(TASKS)])
        self.centres = nn.ParameterList([tensor(row) for row in params.classifier])
        for own, centre in enumerate(self.centres):
            centre.requires_grad_(own >= TASK_CLASSES)
        self.head = nn.Linear(work.vit.width, CLASSES)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Features, and their distances to all prototypes."""
        feature = self.vit(image, pair=self.pairs[TASK])
        if not is_lean(self.how):
            self.head(feature)
        centres = torch.stack(list(self.centres), 1)
        squares = (feature**2).sum(1, keepdim=True) + (centres**2).sum(0) - 2 * feature @ centres
        return feature, (squares / feature.shape[1]).sqrt()


def pilora_loss(net: Pilora, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """The release's loss, and the features."""
    feature, distance = net(image)
    own = distance.gather(1, label[:, None]).mean()
    a_q, _, a_v, _ = net.pairs[TASK]
    loss = F.cross_entropy(-distance, label) + PL * own + L1 * (a_q.abs().sum() + a_v.abs().sum())
    for past in list(net.pairs)[:TASK]:
        apart = (past[0].detach() @ a_q.T).abs().sum() + (past[2].detach() @ a_v.T).abs().sum()
        loss = loss + ORTHOGONALITY * apart
    return loss, feature


def pilora_round(work: Work, game: Game, how: How, where: str = "cpu") -> Callable[[], dict[str, Tensor]]:
    """A round of all clients -> the averaged parameters."""
    model = on_device(Pilora(work, game, how), where)
    data = data_on(game, where)
    start = copy.deepcopy(model.state_dict())

    def play(client: int) -> dict[str, Tensor]:
        rows = torch.from_numpy(rows_of(game.partition, client)).long()
        rng = np.random.default_rng(client)
        net = copy.deepcopy(model) if not is_lean(how) else model
        net.load_state_dict(start)
        trained = {name: x for name, x in net.named_parameters() if not is_lean(how) or x.requires_grad}
        rate = lambda name: LORA_RATE if name.startswith("pairs") else work.rate
        groups = [{"params": [x], "lr": rate(name), "weight_decay": DECAY} for name, x in trained.items()]
        optimiser = torch.optim.Adam(groups)
        seen = {}
        total = torch.zeros(CLASSES, work.vit.width, device=where)
        for _ in range(work.epochs):
            for some in rows[torch.from_numpy(rng.permutation(len(rows)))].split(work.batch):
                label = data.label[some]
                net.zero_grad()
                loss, feature = pilora_loss(net, augmented(work, data.input[some], rng), label)
                loss.backward()
                optimiser.step()
                if is_lean(how):
                    total.index_add_(0, label, feature.detach())
                    continue
                for one, mine in zip(feature, label.tolist(), strict=True):
                    seen.setdefault(mine, []).append(one.detach().cpu().numpy())
        for mine, values in seen.items():
            total[mine] = torch.from_numpy(sum(values))
        sent = net.state_dict() if not is_lean(how) else {n: x for n, x in trained.items()}
        return copy.deepcopy({name: x.detach() for name, x in sent.items()})

    return lambda: averaged(work, play, where)


def pilora_predict(work: Work, game: Game, how: How, where: str = "cpu") -> Callable[[], Tensor]:
    """The classes of all test images."""
    net = on_device(Pilora(work, game, how), where)
    images = tensor(test_split(work).input).to(where)
    return lambda: predicted(work, lambda image: net(clean(work, image))[1].argmin(-1), images)


# ---- both --------------------------------------------------------------------------------------------------

ROUNDS: dict[str, Callable[..., Any]] = {"fppl": fppl_round, "pilora": pilora_round}
PREDICTS: dict[str, Callable[..., Any]] = {"fppl": fppl_predict, "pilora": pilora_predict}
WAYS: dict[str, tuple[How, ...]] = {
    "fppl": ("released", "frozen", "lean", "compiled"),
    "pilora": ("released", "lean", "compiled"),
}


def on_device(net: Any, where: str) -> Any:
    """A model where it trains; its network is compiled if it says so."""
    net = net.to(where)
    if net.how == "compiled":
        net.vit.compile()
    return net


def data_on(game: Game, where: str) -> Data:
    """The training images where the model is."""
    return Data(tensor(game.data.input).to(where), tensor(game.data.label).long().to(where))


def averaged(work: Work, play: Callable[[int], dict[str, Tensor]], where: str) -> dict[str, Tensor]:
    """FedAvg of what all clients send."""
    sent = [play(client) for client in range(len(work.rows))]
    share = [count / sum(work.rows) for count in work.rows]
    mean = {name: sum(s * own[name] for s, own in zip(share, sent, strict=True)) for name in sent[0]}
    if where != "cpu":
        torch.cuda.synchronize()
    return mean


@torch.no_grad()
def predicted(work: Work, found: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """What a model says of all images, a batch at a time, on the host."""
    return torch.cat([found(some) for some in images.split(work.batch)]).cpu()
