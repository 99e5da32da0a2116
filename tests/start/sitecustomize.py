"""Runs first in every Python that a test starts: imports make half a million objects, and none of them is garbage.

Looking for it takes a fifth of an import of Lightning, so collections are rare here.
"""

import gc

gc.set_threshold(100_000, 20, 20)
