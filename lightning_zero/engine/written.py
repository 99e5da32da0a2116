"""Whether somebody may have written to whole parameters since they arrived.

Writes in place raise a parameter's version. Writes to ``p.data`` do not, so reading or setting that attribute counts as
one. So does a view that somebody still holds. Memory that is written past all of these (``p.detach().numpy()``, a C++
extension) is not noticed.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class Written:
    """Watches the parameters of one flat buffer."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        _watch_data()
        self._params = params
        self.touched = False
        """Whether ``p.data`` has been asked for or set."""
        self._versions: list[int] = []
        self.restart()

    def restart(self) -> None:
        """The parameters have just been filled."""
        self.touched = False
        self._versions = [param._version for param in self._params]

    def __bool__(self) -> bool:
        return self.touched or any(p._version != v for p, v in zip(self._params, self._versions, strict=True))


def _watch_data() -> None:
    """Make ``nn.Parameter.data`` tell the parameter's flat buffer; for parameters of no engine it is what it was."""
    if "data" in vars(nn.Parameter):
        return
    plain: Any = Tensor.data

    def get(param: nn.Parameter) -> Tensor:
        value: Tensor = plain.__get__(param)
        _touch(param)
        return value

    def set_(param: nn.Parameter, value: Tensor) -> None:
        plain.__set__(param, value)
        _touch(param)

    nn.Parameter.data = property(get, set_, doc=plain.__doc__)  # type: ignore[assignment]


def _touch(param: nn.Parameter) -> None:
    place = param.__dict__.get("_zero_place")
    if place is not None:
        place.flat.written.touched = True
