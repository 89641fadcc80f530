"""Sets a decoder's attention for the length of a forward: a property of the call, not of the model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from oval_adapters.interrupts import hold_interrupts

__all__ = ["AttentionSwitch"]


class AttentionSwitch:
    """Lets forwards on OVAL and plain forwards of one model take turns; forwards of one kind may overlap.

    transformers reads the attention from the config that all layers share, so a plain forward in one thread
    would run on OVAL's function while another thread decodes with an OVAL cache.
    """

    def __init__(self, text_config: Any, name: str) -> None:
        self._config, self._name = text_config, name
        self._before = text_config._attn_implementation
        self._turn = threading.Condition()
        self._num_oval = 0
        self._num_plain = 0

    @contextlib.contextmanager
    def oval(self) -> Iterator[None]:
        """A forward on OVAL's attention."""
        entered = False
        try:
            with self._turn:
                self._turn.wait_for(lambda: self._num_plain == 0)
                with hold_interrupts():
                    if self._num_oval == 0:
                        self._before = self._config._attn_implementation
                        self._config._attn_implementation = self._name
                    self._num_oval += 1
                    entered = True
            yield
        finally:
            with hold_interrupts(), self._turn:
                self._num_oval -= entered
                if self._num_oval == 0:
                    self.restore()
                self._turn.notify_all()

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """A forward on the model's own attention."""
        entered = False
        try:
            with self._turn:
                self._turn.wait_for(lambda: self._num_oval == 0)
                with hold_interrupts():
                    self._num_plain += 1
                    entered = True
            yield
        finally:
            with hold_interrupts(), self._turn:
                self._num_plain -= entered
                self._turn.notify_all()

    def restore(self) -> None:
        """Puts the config's own attention back, wherever a forward was cut off."""
        if self._config._attn_implementation == self._name:
            self._config._attn_implementation = self._before
