"""Sequential heads: head k also sees the tokens that were drafted before it (Hydra's idea). Shapes: `base.py`; M MLP size.

Two forms:
    recurrent  s' = s + MLP(norm[s, h, e(token)]): a path carries one state, as a small recurrent net does. One cell can
               serve all depths (`num_cells=1`), so a file is a few MB.
    prefix     head k: h + MLP(norm[h, e(root), e(t_1) .. e(t_k)]): every head has its own, wider, MLP.
Each part is normed by itself: hidden states are tens of times larger than embeddings, and one norm over both would drown
the tokens.

Parameters at C = 576, M = 1536, K = 4: recurrent with one cell 3.55 M (7.1 MB in bf16), with four 14.2 M; prefix 15.9 M.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from oval_core.errors import ConfigError, did_you_mean
from oval_spec.heads.base import DraftHeads, check_whole
from oval_spec.heads.linear import HeadLinear
from oval_spec.heads.vocabulary import DraftVocabulary

FORMS = ("prefix", "recurrent")


class PartNorm(nn.Module):
    """Norms each of n parts [R, C] by itself, with gains of their own, and joins them: [R, n * C]."""

    def __init__(self, num_parts: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_parts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_parts, hidden_size))

    def forward(self, parts: torch.Tensor) -> torch.Tensor:
        """Returns [R, n * C] from [R, n, C]."""
        normed = F.layer_norm(parts, parts.shape[-1:])
        return torch.addcmul(self.bias, normed, self.weight).flatten(1)


class GatedLayer(nn.Module):
    """down(SiLU(gate x) * up x), or down(SiLU(up x)) without a gate; `down` begins as zero."""

    def __init__(self, in_size: int, mlp_size: int, out_size: int, is_gated: bool) -> None:
        super().__init__()
        self.is_gated = is_gated
        self.up = HeadLinear(in_size, mlp_size * (2 if is_gated else 1))
        self.down = HeadLinear(mlp_size, out_size)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [R, out] from [R, in]."""
        x = self.up(x)
        if self.is_gated:
            gate, x = x.chunk(2, -1)
            x = F.silu(gate) * x
        else:
            x = F.silu(x)
        y: torch.Tensor = self.down(x)
        return y


class ContextMix(nn.Module):
    """h + MLP(h, the W tokens before the root), each token squeezed to C / 8 values first."""

    def __init__(self, context: int, hidden_size: int, mlp_size: int, is_gated: bool) -> None:
        super().__init__()
        squeezed = max(1, hidden_size // 8)
        self.squeeze = HeadLinear(hidden_size, squeezed, bias=False)
        self.norm = PartNorm(1 + context, hidden_size)
        self.mlp = GatedLayer(hidden_size + context * squeezed, mlp_size, hidden_size, is_gated)

    def forward(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Returns [R, C] from hidden [R, C] and context [R, W, C]."""
        parts = self.norm(torch.cat([hidden[:, None], context], 1)).view(
            len(hidden), -1, hidden.shape[1]
        )
        tokens = self.squeeze(parts[:, 1:]).flatten(1)
        mixed: torch.Tensor = hidden + self.mlp(torch.cat([parts[:, 0], tokens], 1))
        return mixed


class SequentialHeads(DraftHeads):
    """Heads that read the path they continue."""

    kind = "sequential"
    is_sequential = True

    def __init__(
        self,
        num_heads: int,
        hidden_size: int,
        *,
        form: str = "recurrent",
        mlp_size: int = 1536,
        num_layers: int = 1,
        num_cells: int = 1,
        is_gated: bool = False,
        sees_hidden: bool = True,
        context: int = 0,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """Builds untrained heads: their states begin as the hidden state.

        Args:
            num_heads: K.
            hidden_size: C.
            form: `recurrent` or `prefix`, see above.
            mlp_size: M.
            num_layers: MLPs of a cell (or of a head of the prefix form), one after the other.
            num_cells: cells of the recurrent form: head k has cell min(k, num_cells - 1), and norms of its own.
            is_gated: SiLU(gate) * up in place of SiLU(up); doubles the first matrix.
            sees_hidden: whether a recurrent cell sees h beside its state.
            context: W, tokens before the root that the start sees.
            vocabulary: tokens that are drafted; None for all.
        """
        super().__init__(num_heads, hidden_size, vocabulary)
        check_whole("mlp_size", mlp_size)
        check_whole("num_layers", num_layers)
        check_whole("num_cells", num_cells)
        check_whole("context", context, least=0)
        _check_form(form, num_cells, num_heads)
        self.form, self.mlp_size, self.num_layers = form, mlp_size, num_layers
        self.num_cells, self.is_gated, self.sees_hidden = num_cells, is_gated, sees_hidden
        self.context = context
        self.mix = ContextMix(context, hidden_size, mlp_size, is_gated) if context else None
        parts = [self._num_parts(k) for k in range(num_heads)]
        cells = range(num_cells if form == "recurrent" else num_heads)
        self.cells = nn.ModuleList(
            nn.ModuleList(
                GatedLayer(parts[k] * hidden_size, mlp_size, hidden_size, is_gated)
                for _ in range(num_layers)
            )
            for k in cells
        )
        self.norms = nn.ModuleList(
            nn.ModuleList(PartNorm(parts[k], hidden_size) for _ in range(num_layers))
            for k in range(num_heads)
        )

    def settings(self) -> dict[str, Any]:
        """See `DraftHeads`."""
        names = ("num_heads", "hidden_size", "form", "mlp_size", "num_layers", "num_cells",
                 "is_gated", "sees_hidden", "context")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def start(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Returns [R, S]: h for the prefix form, s (and h) for the recurrent one."""
        hidden = hidden.to(self.dtype)
        if self.mix is not None:
            hidden = self.mix(hidden, context.to(self.dtype))
        is_pair = self.form == "recurrent" and self.sees_hidden
        return torch.cat([hidden, hidden], 1) if is_pair else hidden

    def step(self, carried: torch.Tensor, embedding: torch.Tensor, k: int) -> torch.Tensor:
        """Returns [R, S']: the next state (and h), or the path with one more embedding."""
        if self.form == "prefix":
            return torch.cat([carried, embedding], 1)
        C = self.hidden_size
        state = self._run(min(k, self.num_cells - 1), k, torch.cat([carried, embedding], 1))
        return torch.cat([state, carried[:, C:]], 1) if self.sees_hidden else state

    def read(self, carried: torch.Tensor, k: int) -> torch.Tensor:
        """Returns [R, C]."""
        return self._run(k, k, carried) if self.form == "prefix" else carried[:, : self.hidden_size]

    def _run(self, cell: int, k: int, joined: torch.Tensor) -> torch.Tensor:
        """Returns the first part of `joined` [R, n * C] after the cell's layers, [R, C]."""
        C = self.hidden_size
        layers, norms = self.cells[cell], self.norms[k]
        assert isinstance(layers, nn.ModuleList), "built above"
        assert isinstance(norms, nn.ModuleList), "built above"
        state, others = joined[:, :C], joined[:, C:]
        for layer, norm in zip(layers, norms, strict=True):
            parts = torch.cat([state, others], 1).view(len(joined), -1, C)
            state = state + layer(norm(parts))
        return state

    def _num_parts(self, k: int) -> int:
        return k + 2 if self.form == "prefix" else 2 + self.sees_hidden


def _check_form(form: str, num_cells: int, num_heads: int) -> None:
    if form not in FORMS:
        raise ConfigError(f"draft heads: got form {form!r}; {did_you_mean(str(form), FORMS)}")
    most = num_heads if form == "recurrent" else 1
    if num_cells > most:
        raise ConfigError(
            f"draft heads: got num_cells {num_cells} with {num_heads} heads of form {form!r}. Allowed: 1 to {most}. "
            "Lower it."
        )
