"""Runs first in every Python that a test starts: its imports take two thirds of the time that they would.

They make half a million objects, none of them garbage. Looking for it takes a fifth of an import of Lightning, so
collections are rare here. Another fifth goes to transformers, which torchmetrics imports where it is installed and no
program that a test starts needs: it looks as if it were not.
"""

import gc
from importlib import metadata

gc.set_threshold(100_000, 20, 20)


def version(name, find=metadata.version):
    if name == "transformers":
        raise metadata.PackageNotFoundError(name)
    return find(name)


metadata.version = version
