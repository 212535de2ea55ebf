"""Parameters with a slot for every task, of which the current task's trains."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fcljax.types import Task


class Slots(NamedTuple):
    """How a NamedTuple of parameters is split by task."""

    fields: Sequence[str]  # those with an axis of tasks in front; the others train in all tasks
    whole: bool = False  # whether clients send all slots, as some releases do, or the current one

    def current(self, params: Any, task: Task) -> Any:
        """The parameters with the current task's slots, without the axis of tasks."""
        return params._replace(**{field: getattr(params, field)[task.index] for field in self.fields})

    def trainable(self, params: Any, task: Task) -> Any:
        """What clients receive and send."""
        return params if self.whole else self.current(params, task)

    def counted(self, trainable: Any, task: Task) -> Any:
        """What of it trains."""
        return self.current(trainable, task) if self.whole else trainable

    def merge(self, params: Any, task: Task, trainable: Any) -> Any:
        """The parameters of all tasks after training."""
        if self.whole:
            return trainable
        merged = {
            field: getattr(params, field).at[task.index].set(getattr(trainable, field))
            for field in self.fields
        }
        return trainable._replace(**merged)

    def lasting(self, trainable: Any) -> Any:
        """What of it trains in all tasks; () in place of each field with slots."""
        return trainable._replace(**dict.fromkeys(self.fields, ()))
