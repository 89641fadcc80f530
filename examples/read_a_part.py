"""Reads a fifth of a text for every new token, and asks how much of the attention that fifth held."""

from __future__ import annotations

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from oval_adapters import attach
from oval_adapters.models import resolve_model


def main() -> None:
    """Continues a text under `full`, `routed` and `guarded`, and prints what each read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smol", help="smol, a folder or a hub id")
    parser.add_argument("--share", type=float, default=0.2, help="of the text that layers read")
    options = parser.parse_args()

    path = resolve_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    days = [f"On day {i} the crew saw {3 * i} whales and wrote it down." for i in range(1, 11)]
    inputs = tokenizer(" ".join(days), return_tensors="pt")

    for policy in ("full", "routed", "guarded"):
        settings: dict[str, object] = {"policy": policy}
        if policy != "full":
            settings["routing"] = {
                "budget_share": options.share,
                "audit_every": 4,
                "dense_layers": [0],  # 3 groups of what is left
                "window_size": 16,  # the text is short: little of it is read in any case
                "num_sink_tokens": 4,
            }
        with attach(model, settings) as oval:
            out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
            text = tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
            print(f"{policy}: {text!r}")
            routing = oval.stats().get("routing")
            if routing and routing["read_share"]:
                held = f"{routing['mass_recall']:.0%} of the attention mass"
                print(f"  {routing['router']} read {routing['read_share']:.0%} of the keys, {held}")


if __name__ == "__main__":
    main()
