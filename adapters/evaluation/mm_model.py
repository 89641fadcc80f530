"""A LLaVA model on OVAL that answers a question about images, greedily. Knows no benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import AutoProcessor

from oval_adapters.evaluation.decode import pad_id
from oval_adapters.families import WRAPPERS
from oval_adapters.load_model import ModelLoadError, load_config_of
from oval_adapters.models import resolve_model
from oval_core.errors import ConfigError, OvalError, PromptTooLongError, UnsupportedModelError
from oval_mm.downsampling import downsampled
from oval_mm.pictures import blank, pad_square

if TYPE_CHECKING:
    from PIL.Image import Image

    from oval_adapters.attachment import Attachment

__all__ = ["AskError", "Asker", "check_vision_model", "load_processor"]

_BARE_TEMPLATE = "USER: {images}{text} ASSISTANT:"
"""LLaVA-1.5's turn, for processors without a chat template."""


class AskError(OvalError, ValueError):
    """One question cannot be put to the model; others can."""


class Asker:
    """Puts questions to a model.

    Args:
        oval: the attached model.
        processor: of the model; see `load_processor`.
        max_new_tokens: tokens an answer, at most.
        pads_images: whether images become squares before the processor cuts or scales them.
        blanks_images: whether images are replaced by their mean colour, to see what is known without them.
        downsample: leaves images the detail that such a share of their tokens can carry; a control for budgets.

    Settings with `speculation` answer by it.
    """

    def __init__(
        self,
        oval: Attachment,
        processor: Any,
        *,
        max_new_tokens: int,
        pads_images: bool = False,
        blanks_images: bool = False,
        downsample: float | None = None,
    ) -> None:
        self._oval, self._processor, self._max_new = oval, processor, max_new_tokens
        self._pads, self._blanks, self._downsample = pads_images, blanks_images, downsample
        self._ways: dict[str, Any] = {}
        if oval.config.speculation is not None:
            self._ways = {"custom_generate": oval.speculative, "tokenizer": processor.tokenizer}
        self.image_tokens = (0, 0)
        """Image tokens of the last question, and how many of them the decoder read."""
        self.image_pages: int | None = None
        """Pages that these tokens are, to be read whole or not at all; None where all are read."""
        text_config = oval.model.config.get_text_config(decoder=True)
        self._limit = getattr(text_config, "max_position_embeddings", None)

    def prompt(self, text: str, num_images: int) -> str:
        """Returns the whole prompt: images first, then the text, in the model's template.

        Raises:
            AskError: the text holds the token that stands for images.
        """
        token = self._processor.image_token
        if token in text:
            raise AskError(f"the text holds {token!r}, which stands for an image")
        if getattr(self._processor, "chat_template", None) is None:
            return _BARE_TEMPLATE.format(images=f"{token}\n" * num_images, text=text)
        content = [{"type": "image"}] * num_images + [{"type": "text", "text": text}]
        whole: str = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return whole

    def answer(self, prompt: str, images: Sequence[Image]) -> str:
        """Returns the model's answer to a whole prompt.

        Raises:
            AskError: the processor refuses the images.
            PromptTooLongError: prompt and answer do not fit into the model's positions.
        """
        model = self._oval.model
        inputs = self._inputs(prompt, [self._fitted(image) for image in images])
        width = inputs["input_ids"].shape[1]
        if self._limit is not None and width + self._max_new > self._limit:
            raise PromptTooLongError(
                f"prompt: got {width} tokens and {self._max_new} for the answer. Allowed: {self._limit} together."
            )
        inputs = inputs.to(model.device, model.dtype)
        count = int((inputs["input_ids"] == model.config.image_token_id).sum())
        before, pages = self._images_read("tokens_read"), self._images_read("pages_seen")
        output = model.generate(
            **inputs,
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=self._max_new,
            pad_token_id=pad_id(model),
            **self._ways,
        )
        after = self._images_read("tokens_read")
        self.image_pages = None if pages is None else self._images_read("pages_seen") - pages
        self.image_tokens = (count, count if before is None or after is None else after - before)
        answer: str = self._processor.tokenizer.decode(output[0, width:], skip_special_tokens=True)
        return answer.strip()

    def _images_read(self, what: str) -> Any:
        """Returns the `tokens_read` or `pages_seen` of images in prompts so far; None where they read all."""
        routing = self._oval.image_routing
        return None if routing is None else routing.stats()[f"image_{what}"]

    def _inputs(self, prompt: str, images: Sequence[Image]) -> Any:
        start = self._processor.tokenizer.bos_token
        try:
            return self._processor(
                images=images,
                text=prompt,
                return_tensors="pt",
                add_special_tokens=not (start and prompt.startswith(start)),
            )
        except ValueError as error:
            raise AskError(f"the processor refuses it: {error}") from error

    def _fitted(self, image: Image) -> Image:
        if self._blanks:
            image = blank(image)
        if self._downsample is not None:
            side, patch = _side(self._processor), self._processor.patch_size
            image = downsampled(image, side, patch, self._downsample)
        if self._pads:
            mean = self._processor.image_processor.image_mean
            red, green, blue = (int(255 * part) for part in mean)
            image = pad_square(image, (red, green, blue))
        return image


def _side(processor: Any) -> int:
    """Returns the pixels a side of what the vision tower sees."""
    images = processor.image_processor
    size = images.crop_size if getattr(images, "do_center_crop", False) else images.size
    side: int = size.get("height") or size["shortest_edge"]
    return side


def check_vision_model(model: str) -> None:
    """Checks, before any weight is read, that a model sees images.

    Raises:
        UnsupportedModelError: it is none of the models that do, on OVAL.
    """
    kind = load_config_of(model).model_type
    if kind not in WRAPPERS:
        raise UnsupportedModelError(
            f"model {model!r}: got model type {kind!r}, which sees no images on OVAL. Allowed: {', '.join(WRAPPERS)}. "
            "Give such a model."
        )


def load_processor(model: str) -> Any:
    """Returns what makes inputs of images and text.

    Raises:
        OvalError: no such model, or no such processor with it.
    """
    path = resolve_model(model)
    try:
        processor = AutoProcessor.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"cannot load the processor of {model!r}: {error}") from error
    lacking = [name for name in ("image_processor", "tokenizer", "image_token") if not hasattr(processor, name)]  # fmt: skip
    if lacking or getattr(processor, "patch_size", None) is None:
        what = ", ".join(lacking) or "patch_size"
        raise ConfigError(
            f"model {model!r}: its processor lacks {what}. Allowed: a processor of LLaVA, saved with save_pretrained. "
            "Save it beside the weights."
        )
    return processor
