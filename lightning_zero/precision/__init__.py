"""What ``Trainer(precision=...)`` means to a sharded module.

``dtypes`` says what parameters and buffers are held in, ``plugin`` adapts Lightning's precision plugins, ``scaler``
moves the loss scale as a configuration says, ``schedulers`` keeps learning rates where they are when a step is skipped.
"""

from lightning_zero.precision.plugin import ZeroPrecision, adapt, choose, raw_optimizer

__all__ = ["ZeroPrecision", "adapt", "choose", "raw_optimizer"]
