"""The states that a unit goes through."""

from enum import Enum


class ParamState(Enum):
    """Where the parameters of a unit are."""

    SHARDED = "sharded"
    """Only this rank's shard is there."""
    GATHERING = "gathering"
    """The whole is being written."""
    UNSHARDED = "unsharded"
    """The whole is readable."""


class GradState(Enum):
    """Where the gradients of a unit are."""

    EMPTY = "empty"
    PARTIAL = "partial"
    """This rank's own contributions, not yet reduced."""
    REDUCING = "reducing"
    READY = "ready"
    """Reduced: each rank holds its shard of the mean."""


LEGAL = {
    (ParamState.SHARDED, ParamState.GATHERING),
    (ParamState.GATHERING, ParamState.UNSHARDED),
    (ParamState.UNSHARDED, ParamState.SHARDED),
    (ParamState.UNSHARDED, ParamState.GATHERING),  # published after the step: stages 1 and 2
    (GradState.EMPTY, GradState.PARTIAL),
    (GradState.READY, GradState.PARTIAL),
    (GradState.PARTIAL, GradState.REDUCING),
    (GradState.REDUCING, GradState.READY),
    (GradState.REDUCING, GradState.EMPTY),  # given up: an exception ended the backward
}
"""The changes of state that can happen."""
