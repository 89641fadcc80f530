"""What the model is given: Hugging Face's own answer, templates, images made square or blank, and bad processors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
import tiny_models
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from oval_adapters import attach
from oval_adapters.evaluation.mm_model import Asker, AskError, check_vision_model, load_processor
from oval_core.errors import ConfigError, OvalError, PromptTooLongError


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llava.save_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return LlavaForConditionalGeneration.from_pretrained(folder).eval()


def picture(seed: int, width: int = 20, height: int = 18) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def asker(model: Any, folder: Path, **settings: Any) -> tuple[Any, Asker]:
    oval = attach(model)
    return oval, Asker(oval, load_processor(str(folder)), max_new_tokens=8, **settings)


def answers(model: Any, folder: Path, images: list[Any], **settings: Any) -> str:
    oval, ask = asker(model, folder, **settings)
    with oval:
        found = ask.answer(ask.prompt("What?", len(images)), images)
        assert oval.counters.forwards > 0
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_the_answer_is_hugging_faces_and_depends_on_the_images(
    model: Any, folder: Path, count: int
) -> None:
    images = [picture(seed) for seed in range(count)]
    processor = AutoProcessor.from_pretrained(folder)
    inputs = processor(images=images, text="[" + "<image>" * count + "What?]>", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    want = processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)  # fmt: skip
    found = answers(model, folder, images)
    assert found == want.strip()
    assert found != answers(model, folder, [picture(9)] * count)


def test_blank_and_square_images_are_what_the_processor_sees(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Image.Image] = []
    processor = load_processor(str(folder))

    class Spy:
        image_token, chat_template = processor.image_token, processor.chat_template
        tokenizer, image_processor = processor.tokenizer, processor.image_processor
        apply_chat_template = processor.apply_chat_template

        def __call__(self, **given: Any) -> Any:
            seen.extend(given["images"])
            return processor(**given)

    with attach(model) as oval:
        for settings in ({"pads_images": True}, {"blanks_images": True}):
            ask = Asker(oval, Spy(), max_new_tokens=1, **settings)
            ask.answer(ask.prompt("What?", 1), [picture(1)])
    square, blank = seen
    mean = tuple(int(255 * part) for part in processor.image_processor.image_mean)
    assert (square.size, square.getpixel((0, 0))) == ((20, 20), mean)
    assert (blank.size, len(blank.getcolors() or [])) == ((20, 18), 1)


def test_a_processor_without_a_template_gets_llavas_own(tmp_path: Path, model: Any) -> None:
    folder = tiny_llava.save_llava(tmp_path, template=None)
    oval, ask = asker(model, folder)
    oval.detach()
    assert ask.prompt("What?", 2) == "USER: <image>\n<image>\nWhat? ASSISTANT:"


def test_a_start_token_of_the_template_is_not_doubled(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_llava.save_llava(tmp_path, template="<s>" + tiny_llava.TEMPLATE)
    given: list[Any] = []
    generate = type(model).generate
    monkeypatch.setattr(type(model), "generate", lambda self, **kw: given.append(kw["input_ids"]) or generate(self, **kw))  # fmt: skip
    answers(model, folder, [picture(1)])
    (ids,) = given
    assert ids[0, :2].tolist() != [1, 1]
    assert ids[0, 0] == 1


def test_questions_that_cannot_be_asked(model: Any, folder: Path) -> None:
    oval, ask = asker(model, folder)
    with oval:
        with pytest.raises(AskError, match="stands for an image"):
            ask.prompt("Where is <image>?", 1)
        with pytest.raises(AskError, match="the processor refuses it"):
            ask.answer("no image token", [picture(1)])
        with pytest.raises(PromptTooLongError, match="2048 together"):
            ask.answer(ask.prompt("x" * 2100, 1), [picture(1)])


def test_bad_models_and_processors(tmp_path: Path) -> None:
    with pytest.raises(OvalError, match="no config.json"):
        load_processor(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    with pytest.raises(OvalError, match="cannot load the processor"):
        load_processor(str(tmp_path))
    text = tiny_models.save_checkpoint(tmp_path / "text", None)
    with pytest.raises(OvalError, match="sees no images"):
        check_vision_model(str(text))
    with pytest.raises(ConfigError, match="its processor lacks image_processor"):
        load_processor(str(text))
