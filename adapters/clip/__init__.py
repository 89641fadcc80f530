"""CLIP models of Hugging Face and open_clip for page embeddings, and the towers that they share with LLaVA."""

__all__: list[str] = []
