"""Files of draft heads: OVAL's own, and the layouts of Medusa, TGI and vLLM.

`load_heads` is the one entry for reading.
"""

from oval_spec.layouts.load import load_heads
from oval_spec.layouts.own import save_heads
from oval_spec.layouts.report import LayoutReport
from oval_spec.layouts.write import write_tgi, write_vllm

__all__ = ["LayoutReport", "load_heads", "save_heads", "write_tgi", "write_vllm"]
