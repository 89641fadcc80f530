"""Image and text pages: spans, 2-D image tiles, CLIP page embeddings, a fusion router, VQA scoring.

Knows pages and token spans, not which model made them: it imports `oval_core` and never
`transformers` or `oval_spec`. Its parts are not built yet; version 0.1.0 holds the paged core.
"""

__all__: list[str] = []
