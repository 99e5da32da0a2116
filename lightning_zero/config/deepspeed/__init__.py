"""DeepSpeed's JSON: ``load`` reads it, ``keys`` and ``zero_keys`` say what becomes of each key, ``rules`` what several
of them decide together, ``translate`` makes settings of them, ``table`` shows it, ``write`` is the way back.
"""

from lightning_zero.config.deepspeed.load import Given, from_environment
from lightning_zero.config.deepspeed.table import table
from lightning_zero.config.deepspeed.translate import Translation, translate
from lightning_zero.config.deepspeed.write import to_deepspeed

__all__ = ["Given", "Translation", "from_environment", "table", "to_deepspeed", "translate"]
