"""The article's call style: OVAL is switched on by a keyword of generate, in a model that is attached."""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oval_adapters import attach
from oval_adapters.models import resolve_model


def main() -> None:
    """Generates with and without OVAL from one attached model and compares the tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smol", help="smol, a folder or a hub id")
    options = parser.parse_args()

    path = resolve_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    inputs = tokenizer("Pages of a book are", return_tensors="pt")

    attach(model)
    paged = model.generate(
        **inputs,
        max_new_tokens=24,
        do_sample=False,
        use_oval=True,
        oval_router=None,  # a router and a page manager of one's own go here; None takes the defaults
        oval_page_manager=None,
    )
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False, use_oval=False)
    print(tokenizer.decode(paged[0], skip_special_tokens=True))
    print(f"same tokens as Hugging Face's cache: {torch.equal(paged, plain)}")


if __name__ == "__main__":
    main()
