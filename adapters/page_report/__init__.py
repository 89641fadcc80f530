"""Which pages each generated token read: `watch_reads` watches a cache, `ReadReport` says it, `draw_reads` shows it."""

from __future__ import annotations

from oval_adapters.page_report.drawing import draw_reads
from oval_adapters.page_report.report import ReadPage, ReadReport, ReadToken
from oval_adapters.page_report.watching import WatchedReads, watch_reads

__all__ = ["ReadPage", "ReadReport", "ReadToken", "WatchedReads", "draw_reads", "watch_reads"]
