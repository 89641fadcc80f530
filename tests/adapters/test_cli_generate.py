"""`oval generate`: its text, its JSON, its errors, and what Ctrl-C leaves."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from typer.testing import CliRunner, Result

from oval_adapters import load_model as loading
from oval_adapters.bench.timed_text import TokenClock
from oval_adapters.cli.app import create_app

KEYS = ["text", "new_tokens", "prompt_tokens", "tokens_per_s", "prefill_s", "decode_ms_p50"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
FAST = ("--dtype", "float32", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_checkpoint(tmp_path_factory.mktemp("tiny"), TEMPLATE)


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    words = ["generate", *map(str, arguments)]
    return CliRunner().invoke(create_app(), words, input=stdin)


def as_json(*arguments: object, stdin: bytes | None = None) -> dict[str, Any]:
    result = run(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_json_has_the_keys_and_is_the_only_line(folder: Path) -> None:
    result = run("--model", folder, "--prompt", "abc", "--max-new-tokens", 6, *FAST, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    row = json.loads(line)
    assert list(row) == [*KEYS, "finish_reason", "stats"]
    assert (row["new_tokens"], row["prompt_tokens"], row["finish_reason"]) == (6, 3, "length")
    assert row["tokens_per_s"] > 0
    assert row["decode_ms_p50"] > 0
    assert row["stats"]["backend"] == "torch"
    assert row["stats"]["tokens_written"] == 3 + 6 - 1  # the last token is never read


def test_oval_gives_what_hugging_face_gives(folder: Path) -> None:
    call = ("--model", folder, "--prompt", "hello there", "--max-new-tokens", 24, *FAST)
    plain = as_json(*call, "--no-oval")
    assert plain["stats"] == {"backend": "transformers sdpa"}
    for options in ((), ("--page-size", 5), ("--backend", "reference"), ("--prefill-chunk", 4)):
        assert as_json(*call, *options)["text"] == plain["text"]
    sampled = (*call, "--temperature", 0.9, "--top-p", 0.95, "--seed", 3)
    assert as_json(*sampled)["text"] == as_json(*sampled, "--no-oval")["text"] != plain["text"]


def test_a_text_without_a_flag_is_the_prompt(folder: Path) -> None:
    call = ("--model", folder, "--max-new-tokens", 4, *FAST)
    assert as_json("abc", *call)["text"] == as_json("--prompt", "abc", *call)["text"]
    assert as_json(*call, "abc")["prompt_tokens"] == 3
    for flag, word in (("--prompt", "got a text and --prompt"), ("--chat", "--prompt and --chat")):
        refused = run("abc", flag, "x", *call)
        assert (refused.exit_code, word in refused.stderr) == (2, True), refused.output


def test_streamed_text_is_the_text(folder: Path) -> None:
    call = ("--model", folder, "--prompt", "abc", "--max-new-tokens", 12, *FAST)
    text = as_json(*call)["text"]
    streamed, held = run(*call), run(*call, "--no-stream")
    assert streamed.stdout == held.stdout == text + "\n"
    assert "tokens/s, prefill" in held.stderr
    both = run(*call, "--stream", "--json")
    assert json.loads(both.stdout)["text"] == text
    assert text in both.stderr


def test_file_and_stdin(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("some text\n", encoding="utf-8")
    call = ("--model", folder, "--max-new-tokens", 4, *FAST)
    row = as_json(*call, "--file", path)
    assert row["prompt_tokens"] == 10  # as it is: the newline counts
    assert as_json(*call, "--file", "-", stdin=b"some text\n")["text"] == row["text"]


def test_chat_goes_through_the_template(folder: Path) -> None:
    call = ("--model", folder, "--max-new-tokens", 4, *FAST)
    assert as_json(*call, "--chat", "hi")["prompt_tokens"] == len("<user>hi<a>")
    row = as_json(*call, "--chat", "hi", "--system", "x")
    assert row["prompt_tokens"] == len("<system>x<user>hi<a>")
    assert row["text"] == as_json(*call, "--prompt", "<system>x<user>hi<a>")["text"]


def test_positions_bound_the_new_tokens(folder: Path) -> None:
    limit = tiny_models.MAX_POSITIONS
    call = ("--model", folder, "--max-new-tokens", 50, *FAST, "--json")
    result = run(*call, "--prompt", "a" * (limit - 4))
    assert json.loads(result.stdout)["new_tokens"] == 5
    assert "at most 5 new tokens" in result.stderr
    too_long = run(*call, "--prompt", "a" * (limit + 1))
    assert too_long.exit_code == 2
    assert f"got {limit + 1} tokens. Allowed: {limit}" in too_long.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "got none. Allowed: exactly one of"),
        (("--prompt", "a", "--chat", "b"), "got --prompt and --chat"),
        (("--prompt", ""), "--prompt: got no text"),
        (("--prompt", " \n"), "--prompt: got no text"),
        (("--file", "no-such-file.txt"), "cannot read no-such-file.txt"),
        (("--file", "."), "cannot read .: Is a directory"),
        (("--prompt", "a", "--system", "b"), "Allowed: with --chat"),
        (("--prompt", "a", "--max-new-tokens", 0), "max-new-tokens: got 0"),
        (("--prompt", "a", "--prefill-chunk", 0), "prefill-chunk: got 0"),
        (("--prompt", "a", "--temperature", -1), "temperature: got -1"),
        (("--prompt", "a", "--temperature", "nan"), "temperature: got nan"),
        (
            ("--prompt", "a", "--temperature", "1e-40"),
            "temperature: got 1e-40. Allowed: 0, or 1e-06",
        ),
        (("--prompt", "a", "--top-p", 0.5), "temperature 0, which is greedy"),
        (("--prompt", "a", "--temperature", 1, "--top-p", 1.5), "top-p: got 1.5"),
        (("--prompt", "a", "--temperature", 1, "--seed", -1), "seed: got -1"),
        (("--prompt", "a", "--page-size", 33), "page_size: got 33"),
        (("--prompt", "a", "--config", "defualt"), "did you mean 'default'?"),
        (("--prompt", "a", "--backend", "torhc"), "did you mean 'torch'?"),
        (("--prompt", "a", "--dtype", "bf16"), "dtype: got 'bf16'"),
        (("--prompt", "a", "--device", "gpu"), "device: got 'gpu'"),
        (("--prompt", "a", "--no-oval", "--page-size", 4), "no-oval: got it with --page-size"),
        (("--prompt", "a", "--model", "smoll"), "did you mean 'smol'?"),
        (("--prompt", "a", "--model", "/"), "holds no config.json"),
    ],
)
def test_an_error_is_one_line(folder: Path, arguments: tuple[object, ...], problem: str) -> None:
    expect_error(run("--model", folder, *arguments), problem)


def expect_error(result: Result, problem: str) -> None:
    """Checks for exit status 2, nothing on stdout and one line on stderr."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert problem in line


def test_a_file_that_is_not_utf8(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    expect_error(run("--model", folder, "--file", path), "is not UTF-8 text: byte 3 is 0xe9")


def test_cuda_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.torch.cuda, "is_available", lambda: False)
    expect_error(run("--model", folder, "--prompt", "a", "--device", "cuda"), "no CUDA device")


def test_models_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_template = tiny_models.save_checkpoint(tmp_path / "plain", None)
    expect_error(run("--model", no_template, "--chat", "hi"), "has no chat template")
    (no_template / "model.safetensors").write_bytes(b"broken")
    expect_error(run("--model", no_template, "--prompt", "hi"), "cannot load the model")
    (no_template / "model.safetensors").unlink()
    expect_error(run("--model", no_template, "--prompt", "hi"), "cannot load the model")
    (no_template / "config.json").write_text("{}", encoding="utf-8")
    expect_error(run("--model", no_template, "--prompt", "hi"), "cannot load the config")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    expect_error(run("--model", "some-owner/no-model", "--prompt", "hi"), "cannot load the config")


def test_weights_that_are_missing(tmp_path: Path) -> None:
    folder = tiny_models.save_checkpoint(tmp_path, None)
    config = (folder / "config.json").read_text(encoding="utf-8")
    vocab = json.loads(config)["vocab_size"]
    tiny_models.build("llama", num_hidden_layers=1, vocab_size=vocab).save_pretrained(folder)
    (folder / "config.json").write_text(config, encoding="utf-8")  # still says 3 layers
    expect_error(run("--model", folder, "--prompt", "hi"), "weights are missing")


def test_debug_shows_the_traceback(folder: Path) -> None:
    result = run("--model", folder, "--prompt", "a", "--page-size", 99, "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


@pytest.mark.parametrize("options", [(), ("--no-stream",), ("--json",)])
def test_ctrl_c_keeps_what_came(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    call = ("--model", folder, "--prompt", "abc", *FAST)
    text = as_json(*call, "--max-new-tokens", 5)["text"]
    put = TokenClock.put

    def interrupted(self: TokenClock, value: Any) -> None:
        put(self, value)
        if len(self.token_ids) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(TokenClock, "put", interrupted)
    result = run(*call, "--max-new-tokens", 40, *options)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.stderr
    if options == ("--json",):
        row = json.loads(result.stdout)
        assert (row["text"], row["finish_reason"]) == (text, "interrupted")
    else:
        assert result.stdout == text + "\n"


@pytest.mark.smol
@pytest.mark.slow
def test_smol_answers() -> None:
    row = as_json("--chat", "What is the capital of France?", "--max-new-tokens", 12)
    assert "Paris" in row["text"]
