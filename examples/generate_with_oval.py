"""Generate on the paged cache: attach a model, call its own generate, look at what the cache did."""

from __future__ import annotations

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from oval_adapters import attach
from oval_adapters.models import resolve_model


def main() -> None:
    """Continues a prompt and prints the text and the cache's counters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smol", help="smol, a folder or a hub id")
    parser.add_argument("--prompt", default="The three primary colours are")
    options = parser.parse_args()

    path = resolve_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    inputs = tokenizer(options.prompt, return_tensors="pt")

    with attach(model) as oval:
        tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        print(tokenizer.decode(tokens[0], skip_special_tokens=True))
        print(oval.stats())


if __name__ == "__main__":
    main()
