"""What a user can set, with types and defaults: the only home of defaults.

Imports neither torch nor omegaconf, so that reading a configuration costs nothing and Hydra can use the dataclass as it
is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lightning_zero.config import checks

MIB = 2**20
DTYPES = ("fp32", "bf16", "fp16", "fp64")


@dataclass(kw_only=True)
class OffloadConfig:
    """Where something rests between two uses. The names are those of DeepSpeed's ``offload_optimizer`` and ``aio``."""

    device: Any = "none"
    """``none``: where it is used; ``cpu``: host memory; ``nvme``: a file in ``nvme_path``; or a place of your own: a
    class or function that, called without arguments on every rank, gives a :class:`lightning_zero.Tier`.
    """

    nvme_path: str | None = None
    """A directory on a disk of this host; each rank makes one file there, which has no name and ends with it."""

    pin_memory: bool = True
    """``cpu`` with a GPU: in page-locked host memory, for quicker copies to and from the GPU."""

    buffer_count: int = 4
    """Of ``offload_optimizer``: windows of its step in host memory, 3 or more; one is stepped, one written, the others
    are read ahead.
    """

    block_size: int = MIB
    """Bytes of one request to the disk; a multiple of 4096."""

    queue_depth: int = 8
    """Requests to the disk that are under way at a time, for each of ``threads``."""

    threads: int = 1
    """Queues of requests."""

    ratio: float = 1.0
    """Of ``offload_optimizer``: how much of the optimizer's state rests there, from 0 to 1, by whole units; the rest
    stays where the unit's parameters are, on the device or, of ``offload_params``, in host memory.
    """

    def __post_init__(self) -> None:
        if self.device not in ("none", "cpu", "nvme") and not callable(self.device):
            raise ValueError(f"device={self.device!r} is none of 'none', 'cpu', 'nvme', and makes no tier.")
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError("device='nvme' needs nvme_path: a directory on a disk of this host.")
        for name, least in (("buffer_count", 3), ("block_size", 4096), ("queue_depth", 1), ("threads", 1)):
            checks.whole(name, getattr(self, name), least)
        if not checks.is_number(self.ratio) or not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio!r} must be a number from 0 to 1.")
        if self.block_size % 4096:
            raise ValueError(f"block_size={self.block_size} must be a multiple of 4096, the pages of direct I/O.")


def _offload(name: str, value: Any) -> OffloadConfig:
    """The configuration that a device's name, a mapping or a configuration stands for."""
    if isinstance(value, OffloadConfig):
        return value
    if value is None or isinstance(value, str) or callable(value):
        return OffloadConfig(device=value or "none")
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name}={value!r} is neither a device ('none', 'cpu', 'nvme'), nor a mapping of settings, nor something"
            " that makes a tier."
        )
    checks.names(name, value, [field.name for field in fields(OffloadConfig)])
    return OffloadConfig(**value)


@dataclass(kw_only=True)
class ZeroConfig:
    """Settings of the ZeRO engine. Every field is also a keyword of :class:`lightning_zero.ZeroStrategy`."""

    stage: int = 3
    """0: plain data parallelism; 1: optimizer state sharded; 2: gradients too; 3: parameters too (ZeRO paper, section
    5).
    """

    reduce_at: str | None = None
    """When gradients are reduced under accumulation: ``window`` (summed locally, reduced once) or ``micro_batch``
    (reduced into the shard in every backward). None: the stage's own way (0 and 1 ``window``, 2 and 3 ``micro_batch``).
    """

    master_dtype: str | None = None
    """What master weights and optimizer states are kept in: ``fp32``, ``bf16``, ``fp16`` or ``fp64``. None: the
    parameter's own dtype, and fp32 where that is a 16-bit one.
    """

    gradient_dtype: str | None = None
    """What gradients are sent, summed and kept in. None: sent in the dtype of the forward, summed and kept in fp32
    where that is a 16-bit one. ``bf16`` gives the memory of the ZeRO paper (section 3.1), with its rounding.
    """

    nonfinite_gradients: str = "warn"
    """What to do with a gradient that is infinite or NaN, before it changes a weight. ``warn``: the first one is told;
    ``raise``: it is an error; ``skip``: each step with one is left out on all ranks, and the first one is told
    (DeepSpeed's ``bf16.check_grad_overflow``). The message names parameter, rank and step. Under loss scaling (fp16)
    the step is skipped, as always.
    """

    unit_classes: tuple[str, ...] = ()
    """Module classes, or their names, that become units. Empty: the elements of ``nn.ModuleList`` and
    ``nn.Sequential``.
    """

    leaf_classes: tuple[str, ...] = ()
    """Module classes, or their names, that are one unit with all that is below them (a mixture of experts, say)."""

    min_unit_bytes: int = 16 * MIB
    """Neighbouring units smaller than this are merged; so that small models have units, too, at least 1/16 of the model
    or 8 MiB is enough. Reductions of small units run beside one another up to this many bytes.
    """

    max_unit_bytes: int = 512 * MIB
    """Units larger than this are split at their children; ``leaf_classes`` and torch's fused modules stay whole.

    Smaller units are split, too, if they are larger than 1/16 of the model, ``min_unit_bytes`` and 8 MiB, for about
    four are whole at a time. Not so what ``unit_classes`` names, what is compiled or scripted, what holds a list (of
    experts, say), and what would burden the root with many small layers. All ranks must then run a block's layers in
    the same order: name a block that chooses among them in ``leaf_classes``. On ``meta``, so much may be whole for an
    ``_init_weights``.
    """

    persistence_threshold: int = 0
    """Stage 3: parameters with at most this many elements stay whole on every rank. 0: none."""

    persistence_limit: int | None = None
    """Stage 3: so many elements at most, of all parameters together, stay whole by ``persistence_threshold``."""

    prefetch: int = 1
    """How many units ahead of the running one are gathered."""

    tile_size: int = 256 * 1024
    """Elements that one slice of the optimizer step touches; a multiple of 64. 0: no tiles."""

    saved_tensors_hooks: bool = True
    """Stage 3: let autograd keep where a weight is, not the weight, so that it can be freed between forward and
    backward. ``torch.func`` transforms refuse such hooks: switch them off for those, and units stay gathered from their
    forward until the optimizer step.
    """

    offload_optimizer: OffloadConfig = field(default_factory=OffloadConfig)
    """Where master weights, reduced gradients and the optimizer's state rest; a device's name or a mapping will do."""

    offload_params: OffloadConfig = field(default_factory=OffloadConfig)
    """Stage 3: where the shards rest that parameters are gathered from; where the forward has 16 bits and the master
    weights stay on the device, those are the shards.
    """

    broadcast_buffers: bool = True
    """Rank 0's buffers are sent to all ranks before a training forward whenever a forward has changed one, as ``ddp``
    does.
    """

    def __post_init__(self) -> None:
        for name in ("offload_optimizer", "offload_params"):
            setattr(self, name, _offload(name, getattr(self, name)))
        for name in ("unit_classes", "leaf_classes"):
            value = getattr(self, name)
            given = (value,) if isinstance(value, str | type) else value
            if not isinstance(given, Sequence) or not all(isinstance(kind, str | type) for kind in given):
                raise ValueError(f"{name}={value!r} must be a module class, its name, or a list of those.")
            setattr(self, name, tuple(kind.__name__ if isinstance(kind, type) else kind for kind in given))
        for name in ("saved_tensors_hooks", "broadcast_buffers"):
            checks.flag(name, getattr(self, name))
        if self.stage not in (0, 1, 2, 3) or isinstance(self.stage, bool):
            raise ValueError(f"stage={self.stage!r} is none of 0, 1, 2, 3.")
        if self.reduce_at not in (None, "window", "micro_batch"):
            raise ValueError(f"reduce_at={self.reduce_at!r} is none of None, 'window', 'micro_batch'.")
        for name in ("master_dtype", "gradient_dtype"):
            if getattr(self, name) not in (None, *DTYPES):
                raise ValueError(f"{name}={getattr(self, name)!r} is none of None, {', '.join(map(repr, DTYPES))}.")
        if self.nonfinite_gradients not in ("warn", "raise", "skip"):
            raise ValueError(f"nonfinite_gradients={self.nonfinite_gradients!r} is none of 'warn', 'raise', 'skip'.")
        for name in ("min_unit_bytes", "max_unit_bytes", "persistence_threshold", "prefetch", "tile_size"):
            checks.whole(name, getattr(self, name), 0)
        limit = self.persistence_limit
        if limit is not None and not checks.is_whole(limit, 0):
            raise ValueError(f"persistence_limit={limit!r} must be a whole number, 0 or more, or None.")
        if self.tile_size % 64:
            raise ValueError(
                f"tile_size={self.tile_size} must be a multiple of 64: optimizer kernels give other bits on other cuts."
            )
        if self.stage == 0 and self.offload_optimizer.device != "none":
            raise ValueError("offload_optimizer needs stage 1, 2 or 3: at stage 0 nothing is sharded.")
        if self.stage < 3 and self.offload_params.device != "none":
            raise ValueError(f"offload_params needs stage 3: at stage {self.stage} parameters are whole on every rank.")
        if self.min_unit_bytes > self.max_unit_bytes:
            raise ValueError(
                f"min_unit_bytes={self.min_unit_bytes} is larger than max_unit_bytes={self.max_unit_bytes}."
            )
