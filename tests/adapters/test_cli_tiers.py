"""The flags of tiers in `oval generate`, `bench parity` and `bench decode`, and `oval bench prefetch`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from typer.testing import CliRunner, Result

from oval_adapters.bench import prefetch, tiered_run
from oval_adapters.bench.prefetch_values import ORDERS, PrefetchSettings, fast_tokens
from oval_adapters.cli.app import create_app
from oval_adapters.cli.tier_options import TierOptions
from oval_core.config import PREFETCH_NAMES, OvalConfig, TierConfig
from oval_core.errors import ConfigError

_one_thread = pytest.fixture(autouse=True)(tiny_models.one_thread)

FAST = ("--dtype", "float32", "--device", "cpu")
LONG = "a long prompt that fast memory cannot hold. " * 6
GENERATE = ("generate", "--prompt", LONG, "--max-new-tokens", 8, *FAST)
PREFETCH = ("bench", "prefetch", "--context", 256, "--fast", "40%", "--steps", 3, *FAST)
ROW_KEYS = {
    "context",
    "order",
    "fast_fraction",
    "fast_tokens",
    "link",
    "link_gbps",
    "total_s",
    "compute_s",
    "resident_s",
    "transfer_s",
    "stall_s",
    "bytes_prefetched",
    "bytes_used",
    "bytes_late",
    "bytes_wasted",
    "bytes_waiting_growth",
    "bytes_demanded",
    "lead_ms",
    "identical",
    "ratio",
    "peak_mb",
}
TOKEN_BYTES = 2 * 4 * 3 * 2 * 12  # K and V, float32, layers, KV heads, head dim


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_checkpoint(tmp_path_factory.mktemp("tiny"), None)


@pytest.fixture(autouse=True)
def _own_list_of_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("oval_core.tiers.page_files.cache_dir", lambda: tmp_path / "cache")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), list(map(str, arguments)))


def as_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def expect_error(result: Result, problem: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert problem in line


def tokenize(text: str, **_: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": tiny_models.prompt(30)}


def test_flags_go_over_the_configuration_field_by_field() -> None:
    before = OvalConfig(page_size=4, tiers=TierConfig(fast_tokens=300, sink_tokens=3))
    assert TierOptions().apply(before) is before
    assert TierOptions().apply(OvalConfig()).tiers is None
    after = TierOptions(prefetch="layer", disk="d", direct_io=True).apply(before)
    wanted = TierConfig(fast_tokens=300, sink_tokens=3, prefetch="layer", disk="d", direct_io=True)
    assert after == OvalConfig(page_size=4, tiers=wanted)
    assert TierOptions(direct_io=False).apply(after).tiers.direct_io is False
    assert TierOptions(fast_tokens=90).apply(OvalConfig()).tiers == TierConfig(fast_tokens=90)
    assert TierOptions(direct_io=False, host_tokens=0).flags == ["--host-tokens", "--no-direct-io"]


def test_generate_on_tiers_says_what_moved(folder: Path, tmp_path: Path) -> None:
    plain = as_json(*GENERATE, "--model", folder)
    tiers = ("--fast-tokens", 96, "--disk", tmp_path / "disk", "--host-tokens", 64)
    row = as_json(*GENERATE, "--model", folder, *tiers, "--prefetch", "layer")
    assert row["text"] == plain["text"]
    stats = row["stats"]["tiers"]
    assert (stats["fast_tokens"], stats["prefetch"], stats["link"]) == (96, "layer", "real")
    assert stats["bytes_stored"] > 0
    assert not list((tmp_path / "disk").iterdir())
    lines = run(*GENERATE, "--model", folder, *tiers).stderr
    assert "moved " in lines
    assert "modelled link" not in lines
    lines = run(*GENERATE, "--model", folder, *tiers, "--link-latency-us", 1).stderr
    assert "s (modelled link)" in lines
    assert "moved" not in run(*GENERATE, "--model", folder).stderr


def test_generate_takes_tiers_from_a_configuration(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiers.yaml"
    path.write_text("page_size: 8\ntiers: {fast_tokens: 96}\n", encoding="utf-8")
    stats = as_json(*GENERATE, "--model", folder, "--config", path, "--prefetch", "none")["stats"]
    assert (stats["page_size"], stats["tiers"]["fast_tokens"]) == (8, 96)
    assert stats["tiers"]["prefetch"] == "none"
    assert stats["tiers"]["bytes_prefetched"] == 0 < stats["tiers"]["bytes_demanded"]


@pytest.mark.parametrize("command", ["parity", "decode"])
def test_benches_run_on_tiers_and_say_so(folder: Path, command: str) -> None:
    quick = {
        "parity": ("--cases", "story 0", "--max-new-tokens", 4, "--dtype", "float32"),
        "decode": ("--context", 200, "--steps", 1, "--warmup", 0, "--rounds", 1, *FAST),
    }[command]
    call = ("bench", command, "--model", folder, *quick)
    assert as_json(*call)["tiers"] is None
    tiers = ("--fast-tokens", 96, "--link-gbps", 5)
    report = as_json(*call, *tiers)
    assert report["tiers"]["fast_tokens"] == 96
    assert report["tiers"]["link"] == "modelled link"
    if command == "parity":
        assert report["identical"] == len(report["rows"]) == 1
    else:
        assert report["rows"][0]["max_logit_diff"] < 1e-4
    assert "modelled link 5 GB/s" in " ".join(run(*call, *tiers).stdout.split())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--prefetch", "layer"), "tiers: got --prefetch without --fast-tokens"),
        (("--disk", "d", "--no-direct-io"), "got --disk, --no-direct-io without --fast-tokens"),
        (("--fast-tokens", 0), "tiers.fast_tokens: got 0"),
        (("--fast-tokens", 20), "Allowed with 3 tiered layers and pages of 16"),
        (("--fast-tokens", 96, "--prefetch", "orcale"), "did you mean 'oracle'?"),
        (("--fast-tokens", 96, "--host-tokens", 5), "without a disk"),
        (("--fast-tokens", 96, "--direct-io"), "without a disk"),
        (("--fast-tokens", 96, "--disk", ""), "Allowed: a folder"),
        (("--fast-tokens", 96, "--disk", "/dev/null/d"), "where no file can be written"),
        (("--fast-tokens", 96, "--link-gbps", "nan"), "tiers.link_gbps: got nan"),
        (("--fast-tokens", 96, "--link-latency-us", -1), "tiers.link_latency_us: got -1"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "bench parity", "bench decode"])
def test_wrong_flags_are_one_line(
    folder: Path, command: str, arguments: tuple[object, ...], problem: str
) -> None:
    more = {"generate": ("--prompt", "a"), "bench decode": ("--context", 16)}.get(command, ())
    expect_error(run(*command.split(), "--model", folder, *more, *arguments), problem)


def test_flags_of_tiers_are_refused_without_oval(folder: Path) -> None:
    result = run(*GENERATE, "--model", folder, "--no-oval", "--page-size", 4, "--fast-tokens", 96)
    expect_error(result, "no-oval: got it with --page-size, --fast-tokens")


def test_prefetch_gives_a_row_an_order(folder: Path, tmp_path: Path) -> None:
    report = as_json(*PREFETCH, "--model", folder, "--disk", tmp_path, "--threads", 1)
    rows = {row["order"]: row for row in report["rows"]}
    assert tuple(rows) == ORDERS
    for row in rows.values():
        assert set(row) == ROW_KEYS
        assert row["identical"]
        assert (row["context"], row["fast_tokens"], row["fast_fraction"]) == (256, 102, 0.3984)
        assert (row["link"], row["link_gbps"]) == ("real", None)
        assert row["compute_s"] == rows["none"]["compute_s"]
        parts = row["bytes_used"] + row["bytes_wasted"] + row["bytes_waiting_growth"]
        assert row["bytes_prefetched"] == parts
        assert row["bytes_late"] <= row["bytes_prefetched"] + row["bytes_demanded"]
        slower = max(row["compute_s"], row["transfer_s"])
        assert row["ratio"] == pytest.approx(row["total_s"] / slower, rel=0.01)
    none = rows["none"]
    assert none["bytes_prefetched"] == 0
    assert none["bytes_late"] == none["bytes_demanded"] > 0
    assert none["bytes_demanded"] % TOKEN_BYTES == 0
    assert none["compute_s"] == pytest.approx(none["total_s"] - none["stall_s"], abs=1e-5)
    assert rows["oracle"]["bytes_demanded"] == 0
    assert 0 < rows["recent"]["bytes_demanded"] < none["bytes_demanded"]
    assert (report["steps"], report["threads"], report["disk"]) == (3, 1, str(tmp_path))
    assert report["dtype"] == "float32"
    assert report["machine"]["cores"] >= 1
    assert not list(tmp_path.glob("*.pages"))


def test_prefetch_takes_lists_and_shows_a_table(folder: Path) -> None:
    call = (*PREFETCH, "--model", folder, "--order", "oracle,none", "--rounds", 2)
    result = run(*call, "--context", "200,256", "--fast", "50%")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "modelled" not in words
    assert "200 tokens, 100 of them" in words
    assert "256 tokens, 128 of them" in words
    lines = [line.split() for line in result.stdout.splitlines() if "identical" in line]
    assert [cells[0] for cells in lines if len(cells) == 10] == ["none", "oracle"] * 2


def test_a_modelled_link_says_so_everywhere(folder: Path) -> None:
    call = (*PREFETCH, "--model", folder, "--order", "none")
    result = run(*call, "--link-gbps", 0.05, "--link-latency-us", 100, "--json")
    report = json.loads(result.stdout)
    (row,) = report["rows"]
    assert report["link"] == row["link"] == "modelled link"
    assert row["link_gbps"] == 0.05
    modelled_s = row["bytes_demanded"] / 0.05e9
    assert row["stall_s"] >= modelled_s
    assert row["transfer_s"] >= modelled_s
    assert "modelled link 0.05 GB/s" in " ".join(result.stderr.split())


def test_match_makes_transfers_as_long_as_computing(folder: Path) -> None:
    (row,) = as_json(*PREFETCH, "--model", folder, "--link-gbps", "match", "--order", "none")[
        "rows"
    ]
    assert row["link"] == "modelled link"
    assert row["link_gbps"] > 0
    assert row["transfer_s"] > row["bytes_demanded"] / row["link_gbps"] / 1e9 * 0.99


def test_match_where_nothing_moves_or_latency_is_too_long(folder: Path) -> None:
    call = (*PREFETCH, "--model", folder, "--link-gbps", "match", "--order", "none")
    expect_error(run(*call, "--link-latency-us", 1e5), "Choose a smaller latency")
    settings = PrefetchSettings(contexts=(120,), fast=("90",), steps=1, link_gbps="match")
    model = tiny_models.shared("mistral-window")  # decoding sees the newest pages only
    with pytest.raises(ConfigError, match="nothing has to move"):
        next(prefetch.measure_prefetch(model, tokenize, settings))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--context", "999"), "the positions of this model"),
        (("--context", "4"), "context: got 4. Allowed: more than 5"),
        (("--context", "many"), "whole numbers with commas"),
        (("--fast", "x"), "fast: got 'x'"),
        (("--fast", "nan%"), "fast: got 'nan%'"),
        (("--fast", "0%"), "fast: got 0%, 0 tokens. Allowed: 1..256"),
        (("--fast", "40%,300"), "fast: got 300, 300 tokens. Allowed: 1..256"),
        (("--fast", "10%"), "Allowed with 3 tiered layers"),
        (("--order", "orcale"), "did you mean 'oracle'?"),
        (("--order", ""), "order: got ''"),
        (("--steps", "0"), "steps: got 0"),
        (("--chunk", "0"), "chunk: got 0"),
        (("--rounds", "0"), "rounds: got 0"),
        (("--threads", "0"), "threads: got 0"),
        (("--link-gbps", "0"), "link-gbps: got '0'"),
        (("--link-gbps", "fast"), "link-gbps: got 'fast'"),
        (("--link-gbps", "inf"), "tiers.link_gbps: got inf"),
        (("--link-latency-us", "-1"), "tiers.link_latency_us: got -1"),
        (("--direct-io",), "without a disk"),
        (("--host-tokens", "9"), "without a disk"),
        (("--disk", "/dev/null/d"), "where no file can be written"),
        (("--dtype", "bfloat61"), "did you mean 'bfloat16'?"),
        (("--model", "smoll"), "did you mean 'smol'?"),
        (("--plot", "none/such.png"), "plot: "),
    ],
)
def test_bad_input_to_prefetch_is_one_line(
    folder: Path, arguments: tuple[str, ...], problem: str
) -> None:
    expect_error(run(*PREFETCH, "--model", folder, *arguments), problem)


def test_ctrl_c_keeps_the_rows_that_are_done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = prefetch.measure_prefetch

    def interrupted(*arguments: Any) -> Iterator[Any]:
        yield next(measure(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(prefetch, "measure_prefetch", interrupted)
    result = run(*PREFETCH, "--model", folder, "--json")
    assert result.exit_code == 130
    assert [row["order"] for row in json.loads(result.stdout)["rows"]] == ["none"]
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.stderr


def test_threads_are_those_of_decoding_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, seen = tiered_run.Runner._forward, []

    def watched(self: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        seen.append((ids.shape[1] > 1, torch.get_num_threads()))
        return forward(self, cache, ids)

    monkeypatch.setattr(tiered_run.Runner, "_forward", watched)
    as_json(*PREFETCH, "--model", folder, "--order", "none", "--threads", 2)
    assert set(seen) == {(True, 1), (False, 2)}
    assert torch.get_num_threads() == 1
    monkeypatch.setattr(tiered_run, "usable_cores", lambda: 5)
    cpu = torch.device("cpu")
    assert tiered_run.decode_threads(PrefetchSettings(), cpu) == 4
    monkeypatch.setattr(tiered_run, "usable_cores", lambda: 1)
    assert tiered_run.decode_threads(PrefetchSettings(), cpu) == 1


def test_ticks_are_counted_beforehand() -> None:
    settings = PrefetchSettings(
        contexts=(160,), fast=("60%", "90"), steps=2, chunk=64, link_gbps="match", orders=("layer",)
    )
    model, done = tiny_models.shared("llama"), []
    measure = prefetch.measure_prefetch(model, tokenize, settings, lambda _, n: done.append(n))
    assert len(list(measure)) == 2
    assert sum(done) == prefetch.num_ticks(settings)


def test_sizes_of_fast_memory() -> None:
    assert [fast_tokens(text, 1000) for text in ("12.5%", "100%", "7")] == [125, 1000, 7]
    assert set(ORDERS) == set(PREFETCH_NAMES)
    for text in ("", "%", "1e3", "-5", "101%", "inf%"):
        with pytest.raises(ConfigError, match="fast: got"):
            fast_tokens(text, 1000)


def test_plot_needs_matplotlib(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    result = run(*PREFETCH, "--model", folder, "--order", "none,oracle", "--plot", path)
    if importlib.util.find_spec("matplotlib") is None:
        expect_error(result, "matplotlib is not installed")
    else:
        assert result.exit_code == 0, result.output
        assert path.stat().st_size > 1000


@pytest.mark.smol
@pytest.mark.slow
def test_smol_decodes_the_same_on_tiers(tmp_path: Path) -> None:
    call = (
        "bench",
        "prefetch",
        "--context",
        400,
        "--fast",
        "50%",
        "--steps",
        4,
        "--disk",
        tmp_path,
    )
    rows = as_json(*call, "--order", "none,oracle")["rows"]
    assert [row["identical"] for row in rows] == [True, True]
