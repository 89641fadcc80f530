"""Columns that are filled later: any order of calls leaves what a plain list of tokens would."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from oval_adapters.columns import ColumnMap
from oval_adapters.vision.gathering import Gathering
from oval_core.values import RowRequest

ROWS = 2
steps = st.lists(
    st.tuples(st.sampled_from(["add", "add", "fill", "crop", "select", "abort"]), st.integers(0, 1 << 16)),
    min_size=1,
    max_size=12,
)  # fmt: skip


@given(steps)
def test_any_order_of_calls(calls: list[tuple[str, int]]) -> None:
    columns = ColumnMap()
    kinds: list[list[str]] = [[], []]
    tokens: list[list[tuple[int, int]]] = [[], []]  # (column, columns when it was read)
    for call, number in calls:
        length = len(kinds[0])
        chance = torch.Generator().manual_seed(number)
        if call in ("add", "abort"):
            width = 1 + number % 6
            new = torch.randint(3, (ROWS, width), generator=chance)  # 0 token, 1 hole, 2 padding
            new[:, -1] = 0
            old = torch.tensor([[kind != "pad" for kind in own] for own in kinds]).view(
                ROWS, length
            )
            mask = torch.cat([old, new != 2], 1)
            requests = columns.request(mask, ROWS, width, unread=new == 1)
            assert [r.num_new for r in requests] == (new == 0).sum(1).tolist()
            if call == "abort":
                columns.abort()
                continue
            columns.commit(int((new == 0).sum(1).max()))
            for row in range(ROWS):
                kinds[row] += [("token", "hole", "pad")[int(kind)] for kind in new[row]]
                tokens[row] += [(length + i, length) for i in range(width) if new[row, i] == 0]
        elif call == "fill":
            chosen = [
                [c for c, kind in enumerate(own) if kind == "hole" and torch.rand((), generator=chance) < 0.5]
                for own in kinds
            ]  # fmt: skip
            width = max(map(len, chosen))
            if not width:
                continue
            requests = columns.fill([torch.tensor(own, dtype=torch.long) for own in chosen], width)
            for row, own in enumerate(chosen):
                assert requests[row].by_position
                assert requests[row].positions.tolist() == [c for c, _ in tokens[row]] + own
            columns.commit(width)
            for row, own in enumerate(chosen):
                tokens[row] += [(column, length) for column in own]
                for column in own:
                    kinds[row][column] = "token"
        elif call == "crop" and length:
            keep = number % (length + 1)
            got = columns.crop(keep, ROWS)
            for row in range(ROWS):
                for column, then in tokens[row]:
                    if then > keep and column < keep:
                        kinds[row][column] = "hole"
                tokens[row] = [own for own in tokens[row] if own[0] < keep and own[1] <= keep]
                kinds[row] = kinds[row][:keep]
            assert got == [len(own) for own in tokens]
        elif call == "select" and length:
            columns = columns.copy()
            columns.select([1, 0])
            kinds.reverse()
            tokens.reverse()
        _check(columns, kinds, tokens)


def _check(columns: ColumnMap, kinds: list[list[str]], tokens: list[list[tuple[int, int]]]) -> None:
    length = len(kinds[0])
    assert columns.length == length
    for row in range(ROWS):
        places = columns.places(row)
        got = list(range(length)) if places is None else places.tolist()
        assert got == [column for column, _ in tokens[row]]
        holes = columns.unread(row, 0, length).tolist()
        assert holes == [kind == "hole" for kind in kinds[row]]


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_gathering_puts_everything_back(kept: list[list[bool]]) -> None:
    mask = torch.tensor(kept)
    gathering = Gathering.of(mask)
    values = torch.arange(1.0, 1 + mask.numel() * 2).view(*mask.shape, 2)
    taken = gathering.take(values)
    assert gathering.width == max(1, int(mask.sum(1).max()))
    assert torch.equal(gathering.put(taken, 5), values * mask[..., None])
    counts = mask.sum(1).tolist()
    requests = gathering.narrow([RowRequest(count) for count in counts])
    for row, request in enumerate(requests):
        places = request.query_places
        own = taken[row] if places is None else taken[row, places]
        assert torch.equal(own, values[row][mask[row]])
