"""Share a prefix: a long text is prefilled once, and every question starts from a copy of its cache."""

from __future__ import annotations

import argparse
import copy

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oval_adapters import attach
from oval_adapters.models import resolve_model

TEXT = (
    "The ferry to the island leaves at nine in the morning and comes back at six in the evening. "
    "A ticket costs twelve euros, and children under ten travel free."
)
QUESTIONS = (" The ferry leaves at", " A ticket costs", " Children under ten")


def main() -> None:
    """Continues three sentences about one text, computing the text once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smol", help="smol, a folder or a hub id")
    options = parser.parse_args()

    path = resolve_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    prefix = tokenizer(TEXT, return_tensors="pt")["input_ids"]

    with attach(model) as oval:
        shared = oval.new_cache()
        with torch.no_grad():
            model(prefix, cache=shared, use_cache=True, logits_to_keep=1)
        print(f"prefix: {shared.get_seq_length()} tokens, computed once")
        for question in QUESTIONS:
            tail = tokenizer(question, add_special_tokens=False, return_tensors="pt")["input_ids"]
            ids = torch.cat([prefix, tail], dim=1)
            tokens = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                cache=copy.deepcopy(shared),  # the shared one stays as it is
                max_new_tokens=12,
                do_sample=False,
            )
            new = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
            print(f"{question.strip()} ->{new!r}")


if __name__ == "__main__":
    main()
