"""Measures speculative decoding against plain decoding: prompts, the run, totals, reports."""
