"""CLIP's joint space for pages: what a text page says and what an image page shows, as vectors that compare."""

__all__: list[str] = []
