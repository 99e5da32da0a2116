"""A training step, seen: where its time and its memory go (``ZeroMonitor(report=...)``).

``timeline`` and ``memory`` listen to the engine (``engine.events``), ``chrome`` and ``pictures`` write what they have
heard, ``step`` says which steps are looked at. Nothing here knows Lightning.
"""

from lightning_zero.report.step import StepReport

__all__ = ["StepReport"]
