"""Operations with a plain torch reference and, where it pays, a Triton kernel each.

Importing this package needs neither Triton nor a GPU: an operation imports its ``kernel.py`` when it first runs it.
"""

from specvocab_kernels.gather_dot import gather_dot
from specvocab_kernels.select_candidates import select_candidates

__all__ = ["gather_dot", "select_candidates"]
