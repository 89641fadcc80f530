"""Continue a chat: the second turn runs on the cache of the first, so only its own tokens are computed."""

from __future__ import annotations

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from oval_adapters import attach
from oval_adapters.models import resolve_model


def main() -> None:
    """Asks twice; the second question needs the answer to the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smol", help="smol, a folder or a hub id")
    options = parser.parse_args()

    path = resolve_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)

    messages, cache, tokens = [], None, None
    with attach(model) as oval:
        for question in ("Name one planet.", "Is it larger than the Earth?"):
            messages.append({"role": "user", "content": question})
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            ids = inputs["input_ids"]
            cached = 0
            if cache is not None:  # keep what the new prompt repeats token by token
                cached = cache.get_seq_length()
                same = int((ids[0, :cached] == tokens[0, :cached]).cumprod(0).sum())
                cache.crop(same - cached)
                cached = same
            out = model.generate(
                **inputs,
                cache=cache,
                max_new_tokens=24,
                do_sample=False,
                return_dict_in_generate=True,
            )
            cache, tokens = out.cache, out.sequences  # the first turn made it; the second grows it
            answer = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
            print(f"{question} -> {answer!r}  ({cached} of {ids.shape[1]} tokens were cached)")
        print(f"tokens computed in all: {oval.stats()['tokens_written']}")


if __name__ == "__main__":
    main()
