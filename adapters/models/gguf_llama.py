"""Turns a Llama model in a GGUF file into a plain Hugging Face folder. Contacts no hub."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from oval_adapters.models.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from oval_adapters.models.catalog import EmbeddedModel
    from oval_adapters.models.progress import BuildReporter

TIED_KEY = "lm_head.weight"  # the only key that a state dict may lack: it is the embedding


def convert(weights: Path, out: Path, model: EmbeddedModel, reporter: BuildReporter) -> None:
    """Writes the model and its tokenizer to `out`, loadable offline by the Auto classes.

    Raises:
        BuildError: the file's content is not what the catalog says.
    """
    reporter.step("importing torch and transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, dtype = weights.parent, getattr(torch, model.dtype)
    with _quiet_loading(reporter):
        reporter.step("reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(
            folder, gguf_file=weights.name, local_files_only=True
        )
        reporter.step("reading the model's header")
        quantised = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=weights.name, dtype=dtype, local_files_only=True
        )
        reporter.step(f"saving the model in {model.dtype}")
        _prepare_tokenizer(tokenizer, model)
        plain = _plain_model(quantised, model)
        _set_generation(plain, tokenizer)
        plain.save_pretrained(out)
        tokenizer.save_pretrained(out)


def _plain_model(quantised: PreTrainedModel, model: EmbeddedModel) -> PreTrainedModel:
    # A model loaded from GGUF counts as quantised and refuses to be saved; its state dict does not.
    values = quantised.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        values.pop(key, None)
    module, name = model.model_class.split(":")
    model_class = getattr(import_module(module), name)
    plain = model_class(model_class.config_class(**values)).to(quantised.dtype)
    result = plain.load_state_dict(quantised.state_dict(), strict=False)
    missing = sorted(set(result.missing_keys) - {TIED_KEY})
    if missing or result.unexpected_keys:
        raise BuildError(
            f"the weights of {model.name!r} do not fit {name}: missing {missing}, unexpected "
            f"{sorted(result.unexpected_keys)}. Install a transformers in the supported range "
            "(oval doctor names it) and build again."
        )
    plain.tie_weights()
    return plain.eval()


def _prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, model: EmbeddedModel) -> None:
    if tokenizer.eos_token != model.end_token or not tokenizer.chat_template:
        raise BuildError(
            f"the tokenizer of {model.name!r} ends with {tokenizer.eos_token!r}, expected "
            f"{model.end_token!r}, or has no chat template. Install a transformers in the "
            "supported range (oval doctor names it) and build again."
        )
    tokenizer.model_max_length = model.max_length
    tokenizer.padding_side = "left"  # a decoder continues from the last token
    tokenizer.init_kwargs.pop("local_files_only", None)  # how we loaded it is no fact about it


def _set_generation(plain: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    from transformers import GenerationConfig

    plain.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


@contextmanager
def _quiet_loading(reporter: BuildReporter) -> Iterator[None]:
    """Sends transformers' progress bars to the reporter, and puts everything back at the end."""
    from transformers import modeling_gguf_pytorch_utils as loader
    from transformers.utils import logging

    def report(tensors: Sequence[object], desc: str = "") -> Iterable[object]:
        reporter.step("dequantising the weights", len(tensors), "tensors")
        for done, tensor in enumerate(tensors, start=1):
            yield tensor
            reporter.update(done)

    bars_were_on, bar = logging.is_progress_bar_enabled(), vars(loader).get("tqdm")
    logging.disable_progress_bar()
    if bar is not None:  # an inner name of transformers: without it a bar is shown twice, no more
        loader.tqdm = report
    try:
        yield
    finally:
        if bar is not None:
            loader.tqdm = bar
        if bars_were_on:
            logging.enable_progress_bar()
