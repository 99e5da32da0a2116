"""What may happen to an optimizer's gradients between backward and step: unscaling, clipping, a look for infinities."""

import warnings
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.comm import Communicator
from lightning_zero.engine.nonfinite import Watch
from lightning_zero.engine.norm import GradientNorm, scale_, unscale_
from lightning_zero.engine.optim import ShardedOptimizer


class Clipper:
    """Works on the reduced shards of one optimizer's gradients. All methods are collective.

    Args:
        sharded: gives the sharded side of an optimizer.
        close_window: reduces what is still only summed.
        watch: knows whether a reduction has met an infinite or NaN gradient.
        comm: the ranks.
        nonfinite: what such a gradient is: ``warn``, ``raise`` or ``skip``.
    """

    def __init__(
        self,
        sharded: Callable[[Optimizer], ShardedOptimizer],
        close_window: Callable[[], None],
        watch: Watch,
        comm: Communicator,
        nonfinite: str,
    ) -> None:
        self._sharded, self._close_window = sharded, close_window
        self._watch, self._comm, self._policy = watch, comm, nonfinite
        self._warned = False
        self.norm: GradientNorm | None = None
        """The norm before and after the last clipping by norm."""

    def clip_norm_(
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients to a global norm of at most ``max_norm``.

        Returns:
            The norm before, 0-dim fp32, as ``torch.nn.utils.clip_grad_norm_``.

        Raises:
            RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; on all ranks.
        """
        self._close_window()
        gradients = self._sharded(optimizer).gradients()
        norm = gradients.norm(self._comm, float(norm_type))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"{self._step()}: the total norm of order {norm_type} of the gradients is {norm.item()}, so they "
                f"cannot be clipped. Not finite: {self._nonfinite(optimizer) or 'only their norm'}."
            )
        self.norm = GradientNorm(norm, scale_(chain.from_iterable(gradients.all(writes=True)), norm, max_norm))
        return norm

    @torch.no_grad()
    def clip_value_(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clamp the gradients to ``[-clip_value, clip_value]``."""
        self._close_window()
        for tensor in chain.from_iterable(self._sharded(optimizer).gradients().all(writes=True)):
            tensor.clamp_(-clip_value, clip_value)

    def unscale_(self, optimizer: Optimizer, scale: float) -> str | None:
        """Divide the gradients by a loss scale.

        Returns:
            None if all of them are finite on all ranks; otherwise which are not, in words.
        """
        self._close_window()
        overflows = unscale_(self._sharded(optimizer).gradients().all(writes=True), 1.0 / scale)
        overflow = torch.tensor([overflows], dtype=torch.uint8, device="cpu")
        self._comm.all_reduce(overflow, "max", "overflow").wait()
        names = self._nonfinite(optimizer) if overflow.item() else None
        self._forget(optimizer)
        return names

    def to_skip(self, optimizer: Optimizer) -> str | None:
        """Whether the step is to be skipped, without a loss scale: the same on all ranks, and a warning the first time.

        Returns:
            None if it is not; otherwise which gradients are not finite, in words.
        """
        if self._policy != "skip":
            return None
        self._close_window()
        if not self._watch.everywhere:
            return None
        names = self._nonfinite(optimizer)
        self._forget(optimizer)
        if names:
            self._warn(
                f"{self._step()}: the gradient of {names} is not finite. The step is left out on all ranks, and so will"
                " be others like it, without another warning: see the precision plugin's skipped_steps."
            )
        return names or None

    def check_finite(self, optimizer: Optimizer) -> None:
        """Report gradients that are not finite, if a reduction has met one and the user has not mended it since.
        Nothing is left to report where such steps are skipped.

        Raises:
            RuntimeError: there is one, and the configuration wants that to be an error.
        """
        if not self._watch.everywhere or self._policy == "skip":
            return
        names = "" if self._warned else self._nonfinite(optimizer)
        self._forget(optimizer)
        if not names:
            return
        text = f"{self._step()}: the gradient of {names} is not finite. No weight has changed yet."
        if self._policy == "raise":
            raise RuntimeError(text)
        self._warn(f"{text} The step goes on, and weights will not be finite after it.")

    def _warn(self, text: str) -> None:
        if not self._warned and self._comm.rank == 0:
            warnings.warn(text, stacklevel=3)
        self._warned = True

    def _forget(self, optimizer: Optimizer) -> None:
        """The gradients of this optimizer have been looked at."""
        if self._watch.everywhere:
            self._watch.forget(self._sharded(optimizer).names())

    def _step(self) -> str:
        return f"Step {self._comm.peers.step}"

    def _nonfinite(self, optimizer: Optimizer) -> str:
        """Which of the gradients are not finite now, in words; empty if all are."""
        bad = {
            flat.names[index]
            for flat, index, own in self._sharded(optimizer).gradients().by_parameter()
            if not torch.isfinite(own).all()
        }
        everywhere: set[str] = set().union(*self._comm.collect(bad))
        return self._watch.report(everywhere) if everywhere else ""
