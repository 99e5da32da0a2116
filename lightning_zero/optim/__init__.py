"""Optimizers and learning rate schedulers that a configuration names.

``optimizers`` and ``schedules`` make them of their names in DeepSpeed's JSON or in torch; ``lion`` and
``deepspeed_schedules`` are those that torch does not have.
"""

from lightning_zero.optim.optimizers import check_optimizer, make_optimizer
from lightning_zero.optim.schedules import check_scheduler, make_scheduler

__all__ = ["check_optimizer", "check_scheduler", "make_optimizer", "make_scheduler"]
