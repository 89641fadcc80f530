"""Speculative decoding: drafters, token trees, verification, page fusion, acceptance metrics.

Knows token ids, logits and pages, not which model made them: it imports `oval_core` and never
`transformers` or `oval_mm`. Its parts are not built yet; version 0.1.0 holds the paged core.
"""

__all__: list[str] = []
