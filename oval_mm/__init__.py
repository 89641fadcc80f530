"""Images beside text: reading and scoring of evaluations on them (MMBench, VQA), offline.

Knows questions, answers and base64 images, not which model answered: it imports `oval_core` and never `transformers` or
`oval_spec`. Image pages, CLIP page embeddings and the fusion router will live here too.
"""

__all__: list[str] = []
