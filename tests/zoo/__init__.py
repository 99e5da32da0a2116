"""Small hostile modules: each has one habit of real models that an engine which frees parameters can get wrong.

A model makes its own data (``batch(rank, step)``) and its own scalar ``loss(batch)``. Nearly all are cut into several
units when ``min_unit_bytes=0``. ``ZOO`` holds all of them by name.
"""

from zoo import flow, layers, reads  # noqa: F401 - fill ZOO
from zoo.base import DIM, ZOO, Batch, Block, Blocks, Model, make

__all__ = ["DIM", "ZOO", "Batch", "Block", "Blocks", "Model", "make"]
