"""What the engine does, told as it does it: to a listener (tests, ``lightning_zero.report``) and to torch's profiler.

An event is what happens and the unit that it happens to, ``("gather", "blocks.3")``; the unit is empty where it is all
of them. ``X`` and ``X_done`` enclose something that takes time in this process:

============================  ========================================================================================
``forward``, ``backward``     of a unit, or, without a unit, the whole pass. A unit's ``backward`` is told while
                              somebody listens or profiles only; its ``backward_done`` always
``gather``, ``reduce``        a collective is launched; it goes on in the background
``wait``, ``reduce_wait``     a gather is waited for; a reduction, before its result is added to the shard
``step``                      the optimizer's, without a unit
``reshard``                   whole parameters are freed
============================  ========================================================================================
"""

from typing import Protocol

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

_DONE = "_done"


class Listener(Protocol):
    """Who is told: a list is enough."""

    def append(self, event: tuple[str, str], /) -> None:
        """Something happens now."""


class Events:
    """Passes events on. Costs a look at two flags while nobody listens and nobody profiles.

    For ``torch.profiler`` each is a label, ``zero: gather blocks.3``.
    """

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self._labels: dict[tuple[str, str], record_function] = {}

    @property
    def heard(self) -> bool:
        """Whether somebody listens or profiles."""
        return self.listener is not None or _profiler_enabled()

    def __call__(self, event: str, unit: str) -> None:
        """Tell what happens, and to which unit."""
        if self.listener is not None:
            self.listener.append((event, unit))
        if self._labels or _profiler_enabled():
            self._label(event, unit)

    def _label(self, event: str, unit: str) -> None:
        if event.endswith(_DONE):
            kind = event.removesuffix(_DONE)
            # with a pass the labels of its units end, too: one whose last gradient has not come is open still
            for key in [key for key in self._labels if key == (kind, unit) or (key[0] == kind and not unit)][::-1]:
                self._labels.pop(key).__exit__(None, None, None)
        elif (event, unit) not in self._labels and _profiler_enabled():
            label = record_function(f"zero: {event.replace('_', ' ')} {unit}".rstrip())
            label.__enter__()  # type: ignore[no-untyped-call]
            self._labels[event, unit] = label
