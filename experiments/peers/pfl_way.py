"""pfl-research's federated averaging, run by an environment that has it: `outside.py`."""

import dataclasses
from collections.abc import Callable

import torch
from networks import from_torch, to_torch, torch_images, torch_kernel, torch_logits
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from served import Served, serve


class Net(torch.nn.Module):
    """The network of the workload, as pfl wants it: with a loss and metrics."""

    def __init__(self, weights: dict):
        super().__init__()
        self.weights = torch.nn.ParameterDict({name: torch_kernel(x) for name, x in weights.items()})

    def forward(self, image):
        return torch_logits(self.weights, image)

    def loss(self, image, label):
        return torch.nn.functional.cross_entropy(self.forward(image), label)

    @torch.no_grad()
    def metrics(self, image, label):
        return {}


class Unmeasured(FederatedAveraging):
    """Without the evaluation of every client that belongs to pfl's first round."""

    def get_next_central_contexts(self, *arguments):
        contexts, *rest = super().get_next_central_contexts(*arguments)
        return contexts and tuple(dataclasses.replace(each, do_evaluation=False) for each in contexts), *rest


def way(work: Served) -> Callable[[], dict]:
    """A round of all clients by `FederatedAveraging` on the simulating backend, from the first weights."""
    net = Net(work.weights)
    count = len(work.clients)
    start = {name: x.detach().clone() for name, x in net.state_dict().items()}
    users = [Dataset((torch_images(x), to_torch(y).long())) for x, y in work.clients]
    order = iter(number for _ in iter(int, 1) for number in range(count))
    dataset = FederatedDataset(lambda user: users[user], lambda: next(order))
    backend = SimulatedBackend(dataset, None, postprocessors=[WeightByDatapoints()])
    one_round = NNAlgorithmParams(1, 1, train_cohort_size=count, val_cohort_size=None)
    training = NNTrainHyperParams(
        local_batch_size=work.batch, local_num_epochs=work.epochs, local_learning_rate=work.rate
    )

    def play() -> dict:
        net.load_state_dict(start)
        model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
        Unmeasured().run(one_round, backend, model, training)
        return {name: from_torch(x.detach().clone()) for name, x in net.weights.items()}

    return play


if __name__ == "__main__":
    serve(way)
