"""`oval train medusa`: prompts, answers, what is written, and a run that goes on."""

import importlib.util
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tiny_text
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app
from oval_adapters.distill.answers import answer_greedily, answers_of, read_answers
from oval_adapters.distill.prompt_files import Prompt, read_prompts
from oval_adapters.distill.prompts import chat_header, chat_prompt, write_prompts
from oval_adapters.training import medusa_run
from oval_adapters.training.medusa_settings import MedusaTraining
from oval_adapters.training.medusa_stop import asked_to_stop
from oval_core.errors import ConfigError
from oval_spec.heads import BaseFacts
from oval_spec.layouts import load_heads

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model."""
    folder = tiny_text.save_checkpoint(tmp_path_factory.mktemp("tiny"), 2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def facts(folder: Path) -> BaseFacts:
    config = AutoModelForCausalLM.from_pretrained(folder).config
    return BaseFacts(
        model_type=config.model_type, hidden_size=config.hidden_size, vocab_size=config.vocab_size
    )


@pytest.fixture
def quick(folder: Path, tmp_path: Path) -> tuple[object, ...]:
    data = tmp_path / "prompts.txt"
    data.write_text("".join(f"say {i} times {i * i}\n" for i in range(8)), encoding="utf-8")
    given = ("--model", folder, "--data", data, "--out", tmp_path / "out", "--dtype", "float32")
    loop = ("--epochs", 2, "--batch-size", 16, "--validate-every", 4, "--precision", "float32")
    return (*given, *loop, "--max-new-tokens", 12, "--vocabulary", 100, "--mlp-size", 16)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), ["train", "medusa", *map(str, arguments)])


def test_trains_saves_and_goes_on(
    quick: tuple[object, ...], facts: BaseFacts, tmp_path: Path
) -> None:
    result = run(*quick, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert "tau with trees of 32 nodes" in result.stderr
    assert report["positions"] <= 7 * 12
    assert report["held_out_positions"] <= 12
    assert set(report["tau_by_kind"]) == {"prompts", "all"}
    assert (report["resumed_at"], report["draft_tokens"]) == (0, 100)
    assert report["curve"][-1]["updates"] == report["updates"]
    out = tmp_path / "out"
    log = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    assert log == report["curve"]
    heads, _ = load_heads(out, facts)
    assert (heads.kind, heads.num_heads, heads.vocabulary is not None) == ("sequential", 4, True)
    assert heads.accuracy == report["curve"][-1]["accuracy"]
    assert heads.dtype == torch.bfloat16
    assert str(tmp_path) not in (out / "oval_heads.json").read_text()

    again = json.loads(run(*quick, "--json").stdout)
    assert again["resumed_at"] == again["updates"]
    assert again["curve"] == report["curve"]

    other = run(*quick, "--mlp-size", 24)  # finished heads are not written over
    assert other.exit_code != 0
    assert "trained with other settings (mlp_size)" in other.output
    assert load_heads(out, facts)[0].settings() == heads.settings()


def test_the_curve_is_drawn(quick: tuple[object, ...], tmp_path: Path) -> None:
    plot = tmp_path / "curve.png"
    result = run(*quick, "--plot", plot)
    if importlib.util.find_spec("matplotlib") is None:
        assert result.exit_code == 2
        assert "matplotlib is not installed" in result.stderr
    else:
        assert result.exit_code == 0, result.output
        assert plot.read_bytes()[:4] == b"\x89PNG"


def test_independent_heads_are_written_for_other_servers_too(
    quick: tuple[object, ...], facts: BaseFacts, tmp_path: Path
) -> None:
    small = ("--kind", "independent", "--heads", 2, "--soft", 0)
    result = run(*quick, *small, "--layout", "E", "--json")
    assert result.exit_code == 0, result.output
    own, _ = load_heads(tmp_path / "out", facts)
    other, _ = load_heads(json.loads(result.stdout)["layouts"]["E"], facts)
    assert own.kind == other.kind == "medusa"
    hidden = torch.randn(3, facts.hidden_size).bfloat16()
    none = torch.zeros(3, 2, facts.hidden_size).bfloat16()
    torch.testing.assert_close(own(hidden, none), other(hidden, none))
    result = run(*quick, *small, "--layout", "C")
    assert result.exit_code == 2
    assert "vocabulary 0" in result.stderr
    out = tmp_path / "whole"  # other settings: a folder of their own
    result = run(*quick, *small, "--layout", "C", "--vocabulary", 0, "--out", out)
    assert result.exit_code == 0, result.output
    assert load_heads(out / "layout-C", facts)[0].num_heads == 2


def test_answers_of_an_earlier_run_are_data(quick: tuple[object, ...], tmp_path: Path) -> None:
    first = json.loads(run(*quick, "--json").stdout)
    kept = tmp_path / "out" / "answers"
    arguments = [kept if str(a).endswith(".txt") else a for a in quick]
    arguments[arguments.index(tmp_path / "out")] = tmp_path / "other"
    second = json.loads(run(*arguments, "--json").stdout)
    assert second["positions"] + second["held_out_positions"] == (
        first["positions"] + first["held_out_positions"]
    )
    assert not (tmp_path / "other" / "answers").exists()  # nothing was answered again


def test_a_model_writes_its_own_prompts(quick: tuple[object, ...], tmp_path: Path) -> None:
    arguments = ["self" if str(a).endswith(".txt") else a for a in quick]
    result = run(*arguments, "--prompts", 6, "--json")
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)["tau_by_kind"]) == {"self", "all"}
    (path,) = (tmp_path / "out" / "prompts").iterdir()
    assert all(isinstance(turn, str) for turn in json.loads(path.read_text()))


def test_ctrl_c_keeps_what_was_trained(
    quick: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = medusa_run.HeadTrainer

    def noisy(*arguments: Any, tick: Any, **rest: Any) -> Any:
        def interrupted(label: str, done: int, total: int) -> None:
            tick(label, done, total)
            if label == "training" and done == 3:
                signal.raise_signal(signal.SIGINT)

        return original(*arguments, tick=interrupted, **rest)

    whole = json.loads(run(*quick[:4], "--out", tmp_path / "whole", *quick[6:], "--json").stdout)
    with monkeypatch.context() as patch:
        patch.setattr(medusa_run, "HeadTrainer", noisy)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            result = run(*quick)
        finally:
            signal.signal(signal.SIGINT, handler)
    assert result.exit_code == 130
    assert "goes on from what lies in" in result.stderr
    assert not (tmp_path / "out" / "oval_heads.json").exists()
    report = json.loads(run(*quick, "--json").stdout)
    assert report["resumed_at"] == 3
    assert report["curve"] == whole["curve"]


def test_a_second_ctrl_c_counts_at_once() -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with asked_to_stop() as is_stopping:
            assert not is_stopping()
            signal.raise_signal(signal.SIGINT)
            assert is_stopping()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--kind", "sequental"), "did you mean 'sequential'?"),
        (("--layout", "E"), "layout: got E with sequential heads"),
        (("--vocabulary", 10**6), "vocabulary: got 1000000"),
        (("--context", 99), "context: got 99"),
        (("--held-out", 1.5), "held_out: got 1.5"),
        (("--form", "prefixed"), "prefix"),
        (("--data", "nowhere.jsonl"), "data: cannot read nowhere.jsonl"),
        (("--epochs", 0), "epochs: got 0"),
    ],
)
def test_bad_settings_are_one_line(
    quick: tuple[object, ...], arguments: tuple[object, ...], problem: str
) -> None:
    result = run(*quick, *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert problem in result.stderr


def test_answers_are_those_of_plain_generate(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompts = [[5, 6, 7], [9, 8], [20, 21, 22, 23, 24], [9, 8]]
    got = answer_greedily(model, prompts, 10, [tiny_models.EOS])
    for answer in got:
        ids = answer.prompt.long()[None]
        want = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=tiny_models.EOS)
        assert want[0, ids.shape[1] :].tolist() == answer.tokens.tolist()
        assert torch.equal(model.lm_head(answer.hidden).argmax(-1).int(), answer.tokens)
    ticks: list[int] = []
    kept = answers_of(
        model,
        prompts,
        max_new_tokens=10,
        end_ids=[tiny_models.EOS],
        folder=tmp_path,
        batch_size=3,
        tick=lambda label, done, total: ticks.append(done),
    )
    by_prompt = {tuple(own.prompt.tolist()): own.tokens.tolist() for own in got}
    for answer in kept:
        assert by_prompt[tuple(answer.prompt.tolist())] == answer.tokens.tolist()
    assert ticks == [3, 4]
    assert sum(len(list(read_answers(path))) for path in tmp_path.iterdir()) == 4


def test_prompts_in_the_chat_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert chat_header(tokenizer) == "[user]"
    assert tokenizer.decode(chat_prompt(tokenizer, "hi")) == "[user]hi;[assistant]"
    model = AutoModelForCausalLM.from_pretrained(folder)
    one = write_prompts(model, tokenizer, 4, 7)
    assert one == write_prompts(model, tokenizer, 4, 7) != write_prompts(model, tokenizer, 4, 8)
    tokenizer.chat_template = None
    assert tokenizer.decode(chat_prompt(tokenizer, "hi")) == "hi"
    with pytest.raises(ConfigError, match="no chat template"):
        chat_header(tokenizer)


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"turns": ["one", "two"], "category": "qa"}\n\n{"question": "q?"}\n{"prompt": "def f"}\n'
    )
    assert read_prompts(path) == [Prompt("one", "qa"), Prompt("q?", "a"), Prompt("def f", "a")]
    lines = tmp_path / "b.txt"
    lines.write_text("first \n\nsecond\n")
    assert read_prompts(lines) == [Prompt("first", "b"), Prompt("second", "b")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "line 1 of .* is no JSON"), ('{"a": 1}', "line 1 of .* has no prompt"), ("\n", "holds no prompt")],
)  # fmt: skip
def test_bad_prompt_files(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_prompts(path)


def test_a_folder_without_answers_is_refused(quick: tuple[object, ...], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    result = run(*[empty if str(a).endswith(".txt") else a for a in quick])
    assert result.exit_code == 2
    assert "has no answers" in result.stderr


def test_head_settings_make_heads() -> None:
    settings = MedusaTraining(model="m", data=("self",), out="o", kind="independent", layers=2)
    assert settings.head_settings(8) == (
        "medusa",
        {"num_heads": 4, "hidden_size": 8, "num_layers": 2},
    )
