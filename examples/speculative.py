"""Generate several tokens a forward: the text stays the one of plain decoding, token by token."""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oval_adapters import attach
from oval_adapters.models import resolve_model

TEXT = "red, green, blue, white, red, green, blue, white, red, green, blue, white, red, green,"


def main() -> None:
    """Generates twice, plainly and speculatively, and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smol", help="smol, a folder or a hub id")
    parser.add_argument("--drafter", default="auto", help="auto, ngram, medusa, hybrid or self")
    options = parser.parse_args()

    path = resolve_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    inputs = tokenizer(TEXT, return_tensors="pt")
    settings = {"max_new_tokens": 64, "do_sample": False}

    with attach(model, {"speculation": {"drafter": options.drafter}}) as oval:
        start = time.perf_counter()
        plain = model.generate(**inputs, **settings)
        middle = time.perf_counter()
        fast = model.generate(**inputs, **settings, custom_generate=oval.speculative)
        end = time.perf_counter()
        stats = oval.stats()["speculation"]

    print(tokenizer.decode(fast[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"plain {middle - start:.2f} s, speculative {end - middle:.2f} s")
    print(f"{stats['tau']:.2f} tokens a step, drafted by {stats['drafter']}")
    print(f"same tokens as plain decoding: {torch.equal(plain, fast)}")


if __name__ == "__main__":
    main()
