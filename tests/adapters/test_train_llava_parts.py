"""Rows, additions, features and alignment of `oval train llava`, each against the slow and plain way."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_scenes import SIDE, save_cutouts, save_decoder, save_tower
from transformers import AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoTokenizer

from oval_adapters.models.errors import BuildError
from oval_adapters.models.llava_prompt import IMAGE_TOKEN, SPARE_TOKEN, with_image_token
from oval_adapters.models.lora import add_lora, lora_tensors, merge_lora
from oval_adapters.models.smol_llava import llava_processor
from oval_adapters.training.llava_align import align_projector, patch_words, word_embeddings
from oval_adapters.training.llava_features import FeatureStore
from oval_adapters.training.llava_lessons import Lessons, check_rows
from oval_adapters.training.llava_rows import Row, RowMaker, collate
from oval_adapters.training.llava_settings import LlavaTraining
from oval_adapters.training.llava_student import Student, make_projector
from oval_core.errors import ConfigError
from oval_mm.prompts import choice_prompt
from oval_mm.scenes import COLOURS, Library, draw, make_scene


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("tiny llava")
    tower = save_tower(folder / "tower")
    decoder = save_decoder(folder / "decoder")
    tokenizer = with_image_token(AutoTokenizer.from_pretrained(decoder))
    return SimpleNamespace(
        decoder=decoder,
        tower=AutoModel.from_pretrained(tower).eval(),
        processor=AutoImageProcessor.from_pretrained(tower),
        tokenizer=tokenizer,
        image_token=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        maker=RowMaker(tokenizer, 4),
        library=Library([save_cutouts(folder / "cut-outs")]),
    )


def load_decoder(tiny: SimpleNamespace) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny.decoder, attn_implementation="eager")


def make_student(tiny: SimpleNamespace, rank: int = 4) -> Student:
    decoder = load_decoder(tiny)
    student = Student(decoder, make_projector(tiny.tower.config, decoder.config, 0), rank, 0)
    with torch.no_grad():  # as if it had been trained
        generator = torch.Generator().manual_seed(5)
        for module in student.added.values():
            module.b.normal_(0, 0.3, generator=generator)
        student.mean.normal_(generator=generator)
        student.std.uniform_(0.5, 2, generator=generator)
    return student


def settings(**changes: object) -> LlavaTraining:
    values = {"stage": "llava", "pictures": ("p",), "out": "o", "steps": 8, "scenes": 40, "batch": 3}  # fmt: skip
    return LlavaTraining(**(values | changes))


def test_a_row_is_what_its_questions_are_alone(tiny: SimpleNamespace) -> None:
    student, maker = make_student(tiny), tiny.maker
    features = torch.randn(3, 4, 32)
    shared = (maker.part("What?\nA. x", "A", is_words=False), maker.part("Say it all.", "a cat", is_words=True))  # fmt: skip
    drill = maker.part("It is x. What?", "B", is_words=False, sees_pictures=False)
    rows = [Row(maker.opening(1), (*shared, drill)), Row(maker.opening(2), (shared[1], drill, shared[0]))]  # fmt: skip
    packed = collate(rows, tiny.image_token)
    got = student.logits(packed, features)
    alone = []
    for row, seen in ((rows[0], features[:1]), (rows[1], features[1:])):
        for part in row.parts:
            single = collate([Row(row.opening if part.sees_pictures else (), (part,))], tiny.image_token)  # fmt: skip
            assert single.mask[0, 0].equal(torch.ones_like(single.mask[0, 0]).tril())
            assert single.positions[0].tolist() == list(range(single.tokens.shape[1]))
            alone.append(student.logits(single, seen if part.sees_pictures else features[:0]))
    torch.testing.assert_close(got, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_the_loss_is_on_answers_only(tiny: SimpleNamespace) -> None:
    maker = tiny.maker
    letter = maker.part("What?", "A", is_words=False)
    words = maker.part("What?", "a cat", is_words=True)
    batch = collate([Row(maker.opening(1), (letter, words))], tiny.image_token)
    end = tiny.tokenizer.eos_token_id
    said = tiny.tokenizer("a cat").input_ids
    assert batch.targets.tolist() == [*tiny.tokenizer("A").input_ids, end, *said, end]
    assert torch.equal(batch.tokens[batch.rows, batch.places + 1], batch.targets)
    assert batch.answers.tolist() == [0, 0, *[1] * (len(said) + 1)]
    assert batch.weights[:2].tolist() == pytest.approx([1.0, 0.1])
    assert batch.weights[2:].sum().item() == pytest.approx(1.5)
    assert int(batch.is_image.sum()) == 4


def test_rows_are_what_the_processor_makes(tiny: SimpleNamespace) -> None:
    processor = llava_processor(tiny.tokenizer, SIDE, 14)
    text = choice_prompt("What is it?", None, {"A": "cat", "B": "dog"}, "llava")
    library = tiny.library
    pictures = [draw(make_scene(library, "one", random.Random(i)), library) for i in range(3)]
    for count in (1, 3):
        content = [{"type": "image"}] * count + [{"type": "text", "text": text}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)  # fmt: skip
        theirs = processor(images=pictures[:count], text=prompt, return_tensors="pt")
        part = tiny.maker.part(text, "A", is_words=False)
        assert theirs.input_ids[0].tolist() == [*tiny.maker.opening(count), *part.prompt]
        assert theirs.pixel_values.shape == (count, 3, SIDE, SIDE)
    plain = processor.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False)  # fmt: skip
    assert plain == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_vocabulary_does_not_grow(tiny: SimpleNamespace) -> None:
    old = AutoTokenizer.from_pretrained(tiny.decoder)
    assert len(tiny.tokenizer) == len(old)
    assert tiny.image_token == old.convert_tokens_to_ids(SPARE_TOKEN)
    assert tiny.tokenizer("a <image> b").input_ids.count(tiny.image_token) == 1
    with pytest.raises(BuildError, match="no spare token"):
        with_image_token(tiny.tokenizer)  # it is used up


def test_merged_additions_are_the_additions(tiny: SimpleNamespace) -> None:
    student = make_student(tiny)
    ids = torch.randint(5, 200, (2, 9))
    with_additions = student.decoder(ids).logits
    plain = load_decoder(tiny)
    before = plain(ids).logits
    merge_lora(plain.model, lora_tensors(student.added), 2.0)
    torch.testing.assert_close(plain(ids).logits, with_additions, rtol=1e-4, atol=1e-4)
    assert (before - with_additions).abs().max() > 0.01
    wrong = {"layers.0.self_attn.q_proj.a": torch.zeros(4, 7), "layers.0.self_attn.q_proj.b": torch.zeros(48, 4)}  # fmt: skip
    for tensors in (wrong, {"layers.9.mlp.up_proj.a": torch.zeros(4, 48)}):
        with pytest.raises(ConfigError, match="does not fit the decoder"):
            merge_lora(plain.model, tensors, 1.0)


def test_new_additions_change_nothing(tiny: SimpleNamespace) -> None:
    ids = torch.randint(5, 200, (1, 9))
    decoder = load_decoder(tiny)
    before = decoder(ids).logits
    added = add_lora(decoder.model, 4, 2.0, seed=0)
    assert len(added) == 2 * 4
    assert torch.equal(decoder(ids).logits, before)
    assert {name for name, p in decoder.named_parameters() if p.requires_grad} == {
        f"model.{name}.{part}" for name in added for part in "ab"
    }


def test_saved_projectors_read_raw_features(tiny: SimpleNamespace) -> None:
    student = make_student(tiny)
    weights = student.weights(SIDE, {}, {})
    raw = torch.randn(5, 32) * 3 + 1
    plain = make_projector(tiny.tower.config, student.decoder.config, 1)
    plain.load_state_dict(weights.projector)
    wanted = student.projector(student.standardise(raw))
    torch.testing.assert_close(plain(raw), wanted, rtol=1e-4, atol=1e-4)
    other = make_student(tiny)
    with torch.no_grad():
        other.mean.zero_()
    other.load(weights)
    torch.testing.assert_close(other.projector(other.standardise(raw)), wanted, rtol=1e-4, atol=1e-4)  # fmt: skip
    name = next(iter(student.added))
    assert torch.equal(other.added[name].b, student.added[name].b)


def test_features_are_the_towers_and_are_kept(tiny: SimpleNamespace, tmp_path: Path) -> None:
    pictures = [draw(make_scene(tiny.library, "one", random.Random(i)), tiny.library) for i in range(19)]  # fmt: skip
    store = FeatureStore(tmp_path / "features", tiny.tower, tiny.processor)
    got = store.of(pictures)
    assert (store.computed, store.tokens, store.size, store.grid) == (19, 4, 32, (2, 2))
    pixels = tiny.processor(images=pictures, return_tensors="pt").pixel_values
    wanted = tiny.tower(pixels, output_hidden_states=True).hidden_states[-1][:, 1:]
    torch.testing.assert_close(got, wanted.to(torch.bfloat16), rtol=0.02, atol=0.02)
    again = FeatureStore(tmp_path / "features", tiny.tower, tiny.processor)
    assert torch.equal(again.of(pictures), got)
    assert again.computed == 0
    broken = next((tmp_path / "features").rglob("*.bf16"))
    broken.write_bytes(b"cut off")
    assert torch.equal(again.of(pictures), got)
    assert again.computed == 1
    other = AutoModel.from_config(tiny.tower.config)
    assert not torch.equal(FeatureStore(tmp_path / "features", other.eval(), tiny.processor).of(pictures[:1]), got[:1])  # fmt: skip


def test_patches_are_aligned_with_words(tiny: SimpleNamespace) -> None:
    library = tiny.library
    scenes = [make_scene(library, "two", random.Random(i)) for i in range(40)]
    words = [*library.names(False), *COLOURS]
    shown = patch_words(scenes, library, words, (2, 2))
    for scene, row in zip(scenes, shown, strict=True):
        for patch, number in enumerate(row.tolist()):
            if number >= 0 and words[number] not in COLOURS:
                assert words[number] == scene.placed[patch % 2].cutout.name
    assert (shown >= 0).float().mean() > 0.2
    table = torch.randn(len(tiny.tokenizer), 48, generator=torch.Generator().manual_seed(0))
    aims = word_embeddings(words, tiny.tokenizer, table)
    ids = tiny.tokenizer(f" {words[0]}", add_special_tokens=False).input_ids
    torch.testing.assert_close(aims[0], table[ids].mean(0))
    decoder = load_decoder(tiny)
    projector = make_projector(tiny.tower.config, decoder.config, 0)
    # features that tell each patch's word by heart
    features = F.one_hot(shown.clamp(min=0) % 32, 32).float()
    told: list[int] = []
    done = align_projector(projector, features, shown, aims, torch.randn(2, 48), columns=2, updates=30, rate=2e-2, seed=0, tick=told.append)  # fmt: skip
    assert told == list(range(1, 31))
    assert done.accuracy > 0.5  # a chance of 1 in 90


@pytest.mark.parametrize("stage", ["projector", "llava"])
def test_lessons_follow_from_seed_and_number(tiny: SimpleNamespace, stage: str) -> None:
    own = settings(stage=stage, albums=0.5)
    one, other = (Lessons(tiny.library, tiny.maker, own) for _ in range(2))
    for update, progress in ((0, 0.0), (3, 0.3), (9, 0.6), (11, 0.95)):
        assert one.at(update, progress) == other.at(update, progress)
    assert one.at(0, 0.0) != Lessons(tiny.library, tiny.maker, settings(stage=stage, seed=1)).at(0, 0.0)  # fmt: skip
    sizes = {len(lesson.scenes) for update in range(40) for lesson in one.at(update, 0.9)}
    assert sizes == {1} if stage == "projector" else max(sizes) > 4
    assert all(len(lesson.row.parts) == 6 for update in range(5) for lesson in one.at(update, update / 5))  # fmt: skip


def test_no_lesson_names_what_is_held_out(tiny: SimpleNamespace) -> None:
    lessons = Lessons(tiny.library, tiny.maker, settings(albums=0.5))
    assert not any(one.cutout.is_held_out for scene in lessons.scenes for one in scene.placed)
    texts = {
        tiny.tokenizer.decode([*part.prompt, *part.answer])
        for update in range(30)
        for lesson in lessons.at(update, update / 30)
        for part in lesson.row.parts
    }
    held = tiny.library.names(True)
    assert held
    assert not [text for text in texts if any(f" {name}" in text or f"\n{name}" in text for name in held)]  # fmt: skip
    checks = check_rows(tiny.library, tiny.maker, settings(validation=2), held_out=True)
    assert all(len(row.parts) == 4 for _, row in checks)
    assert {item.choice.task for item, _ in checks} == {"naming", "existence", "left_right", "counting", "colour"}  # fmt: skip
    trained = {draw(scene, tiny.library, 32).tobytes() for scene in lessons.scenes}
    known = check_rows(tiny.library, tiny.maker, settings(validation=8), held_out=False)
    new = [draw(scene, tiny.library, 32).tobytes() for item, _ in known for scene in item.scenes]
    assert not trained & set(new)
