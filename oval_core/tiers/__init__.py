"""Where pages wait that do not fit in fast memory, and how they come back in time. Knows no model.

fast (slots of a pool, staging buffers)  <- worker -  host (main memory)  ->  disk (one file a cache)
"""

from oval_core.tiers.tier_checks import check_tiers
from oval_core.tiers.tiered_storage import TieredStorage

__all__ = ["TieredStorage", "check_tiers"]
