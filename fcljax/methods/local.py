"""Local training: clients never communicate. The lower bound in comparisons of federated
methods.

    client    trains its own adapter and classifier in task after task, and sends nothing
    server    does nothing

Each client is evaluated with its own model, and the accuracies are averaged.
"""

from fcljax.adapters.lora import LoraOptions
from fcljax.errors import InputError
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss
from fcljax.parts.proximal import OPTION_OF_RULE
from fcljax.settings import NoOptions, Preset, with_mini
from fcljax.types import Method

# one pair for all tasks: clients could not keep pairs that belong to one task
_LORA = LoraOptions(lora_pairs="one")
PRESETS = with_mini({"intended": Preset(NoOptions(), adapters=(_LORA,))}, lr=1e-2, lora_lr=1e-3)


def local(_options: NoOptions, run: Run) -> Method:
    """Compose local training.

    Raises:
      InputError: for a rule that keeps clients near what was broadcast, which is nothing.
    """
    if run.rules:
        option = OPTION_OF_RULE[run.rules[0].name]
        raise InputError(f"{option}: clients of local are sent no parameters to stay near; leave it out")
    # with all parameters personal, uploads are empty and the server has nothing to merge
    personal = ("adapter", "classifier", "stats")
    return federate(run, linear_learner(run), loss=cross_entropy_loss(), personal=personal)
