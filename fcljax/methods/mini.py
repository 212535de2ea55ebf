"""The scale `mini`: what micro networks and a few dozen steps need in place of the papers' learning rates and
server training, which are for networks and schedules a hundred times as large.

One table, read by `fcljax run --scale mini` and `fcljax reproduce --scale mini`. A method without values here
runs as its paper does. Every value was chosen on held-out training images of digits, glyphs and, where it
says so, a real network, never on test images; docs/results/embedded.md has the accuracies.
"""

from collections.abc import Mapping
from typing import Any

_PROMPT = {"lr": 1e-2}
_WHOLE = {"lr": 5e-3, "full_lr": 5e-4}
_PAIR = {"lora_lr": 1e-3}
# for class means and prototypes: at _PAIR's rate LoRA spoils the features of a real network, and those of a
# micro one are no better
_MEANS = {"lora_lr": 1e-4}
_HEAD = {"lr": 1e-2}

MINI: Mapping[str, Mapping[str, Any]] = {
    # the paper's 5 are a few dozen steps, each of which moves a logit by at most lr * sum |feature|
    "fppl": {"server_epochs": 30},
    "fedavg": {"lr": 3e-3},
    "linear": _HEAD,
    "pilora": _MEANS | {"full_lr": 1e-3},
    "fedncm": {},
    "fedrecon": {},
    "fedclm": _MEANS,
    "ewc": {"ewc_weight": 3e4},
    "hepco": _PROMPT | {"generator_lr": 1e-3},
    **dict.fromkeys(("fedavg-prompt", "fedprox", "centralized-prompt"), _PROMPT),
    # at the release's weights, a million times these, nothing of a new task is learned
    "fed-cprompt": _PROMPT | {"contrast_near": 1e-3, "contrast_far": 1e-5},
    **dict.fromkeys(("fedavg-ft", "cfed", "target"), _WHOLE),
    # one sigmoid a class: a label is one number among those of all seen classes, so the classifier needs more
    "fedlwf-mc": {"lr": 0.1, "full_lr": 1e-4},
    "fedweit": {},
    **dict.fromkeys(("glfc", "lga"), {"lr": 3e-2}),
    **dict.fromkeys(("l2p", "dualprompt", "coda-prompt", "c2prompt"), _PROMPT),
    **dict.fromkeys(("pmae", "l2p-pmae", "dualprompt-pmae", "coda-prompt-pmae"), _PROMPT),
    # a client has a tenth of the papers' examples, over which the priors' weight is divided
    "vfcl": {"lr": 0.05, "full_lr": 1e-3, "prior_weight": 0.01, "rounds": 3},
    **dict.fromkeys(("joint", "centralised", "sequential"), _PAIR),
    **dict.fromkeys(("ditto", "fedper", "fed-talora", "ffa-lora", "local"), _HEAD | _PAIR),
    "fedproto": _HEAD | _MEANS,
    "dolfin": _HEAD | {"lora_lr": 5e-3},
    "lorm": _HEAD | {"lora_lr": 3e-3},
    "mfcl": _WHOLE | {"full_lr": 1.5e-4},
    # with a quarter to a fifth of the synthesis, which takes most of a run
    "lander": _WHOLE
    | {"synthesis_rounds": 10, "synthesis_warmup": 2, "generator_steps": 20, "student_steps": 20},
    # as the papers have them; other values that were tried are no better
    **dict.fromkeys(("lwf", "icarl", "fedslca"), {}),
    # at the classifier's rate, as they are otherwise, LoRA diverges on a real network
    **dict.fromkeys(("scaffold", "feddyn"), {"lora_lr": 1e-2}),
    # closed forms: no learning rate
    **dict.fromkeys(("afcl", "fedranpac", "fedran"), {}),
}
"""Method -> option -> value; options of adapters that a run does not have are left out."""

FROM_RANDOM = {"full_lr": 1e-3}
"""Option -> value for the networks of tables and series, which begin with random values: at the rates of
pretrained networks they hardly train. Chosen on held-out training examples of digits_table."""
