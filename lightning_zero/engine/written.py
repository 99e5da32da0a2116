"""What the user has written to whole parameters, and whether somebody may have since they arrived.

Writes in place raise a parameter's version. Writes to ``p.data`` do not, so reading or setting that attribute counts as
one. So does a view that somebody still holds. Memory that is written past all of these (``p.detach().numpy()``, a C++
extension) is not noticed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.buffer import FlatBuffer

if TYPE_CHECKING:
    from lightning_zero.engine.flat import Flat


class Written:
    """Watches the parameters of one flat buffer."""

    def __init__(self, flat: Flat) -> None:
        _watch_data()
        self._flat, self._params = flat, flat.params
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

    @torch.no_grad()
    def take_in(self) -> None:
        """Parameters that the user has given another tensor as their ``data``: its values move into the flat buffer.

        Raises:
            RuntimeError: nothing can be made of it.
        """
        for index, param in enumerate(self._params):
            if not self._is_at_home(index):
                home = self._home(index)
                home.copy_(param.data)
                param.data = home

    @torch.no_grad()
    def own_current(self, index: int) -> Tensor:
        """This rank's part of parameter ``index``'s master weights, 1-D, in their dtype, with what the user has written
        to the parameter.

        Nothing is taken over: memory that the user has exchanged for other memory, and keeps, stays as it is.

        Raises:
            RuntimeError: nothing can be made of the parameter's data.
        """
        self._is_at_home(index)
        flat, slot = self._flat, self._flat.layout.slots[index]
        start, stop = (bound - slot.start for bound in flat.own_part(index))
        own, master = slot.flatten(self._params[index].detach())[start:stop], flat.own_master(index)
        return torch.where(own != master.to(own.dtype), own.to(master.dtype), master)

    def _home(self, index: int) -> Tensor:
        return self._flat.layout.slots[index].view(self._flat.slot(self._flat.full, index))

    def _is_at_home(self, index: int) -> bool:
        """Whether a parameter is the view of the flat buffer that it should be.

        Raises:
            RuntimeError: the user has given it data that nothing can be made of.
        """
        param, home, name = self._params[index], self._home(index), self._flat.names[index]
        if (param.data_ptr(), param.shape, param.stride()) == (home.data_ptr(), home.shape, home.stride()):
            return True
        if param.shape != home.shape:
            raise RuntimeError(
                f"Parameter {name!r} was given data of shape {tuple(param.shape)}, but it is sharded with shape "
                f"{tuple(home.shape)}: change shapes before the run begins."
            )
        if FlatBuffer.owns(param):
            raise RuntimeError(
                f"Parameter {name!r} was given the memory of another parameter, or another view of its own, as its "
                "data: give it a copy (`p.data = q.data.clone()`), and tie parameters before the run begins."
            )
        return False


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
