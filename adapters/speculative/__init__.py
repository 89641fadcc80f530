"""Speculative decoding as Hugging Face calls it: the loop, its rows, and what it refuses."""
