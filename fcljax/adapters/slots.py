"""Parameters with a slot for every task, of which the current task's trains."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fcljax.types import Task


class Slots(NamedTuple):
    """The split of a NamedTuple of parameters by task."""

    fields: Sequence[str]
    """Fields whose leaves have an axis of tasks in front; the others train in all
    tasks."""
    whole: bool = False
    """Whether clients send the slots of all tasks, as some releases do, or the current
    one."""

    def current(self, params: Any, task: Task) -> Any:
        """Return the current task's slots, without the axis of tasks."""
        slots = {field: getattr(params, field)[task.index] for field in self.fields}
        return params._replace(**slots)

    def trainable(self, params: Any, task: Task) -> Any:
        """Return the parameters that clients receive and send."""
        if self.whole:
            return params
        return self.current(params, task)

    def counted(self, trainable: Any, task: Task) -> Any:
        """Return the part of the trainable parameters that trains in this task."""
        if self.whole:
            return self.current(trainable, task)
        return trainable

    def merge(self, params: Any, task: Task, trainable: Any) -> Any:
        """Return the parameters of all tasks after training."""
        if self.whole:
            return trainable
        # fields without slots train in every task, so their new values replace the old ones
        merged = {
            field: getattr(params, field).at[task.index].set(getattr(trainable, field))
            for field in self.fields
        }
        return trainable._replace(**merged)

    def lasting(self, trainable: Any) -> Any:
        """Return the parameters that all tasks share, with () for fields with slots."""
        return trainable._replace(**dict.fromkeys(self.fields, ()))
