"""Passages have exact lengths, are the same for the same seed, and say truly where each retrieved fact is."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import save_checkpoint
from transformers import AutoTokenizer

from oval_adapters.load_model import load_tokenizer
from oval_adapters.texts import KINDS, Passage, grade, passages, passkey_cases, read_source
from oval_adapters.texts import facts as facts_module
from oval_adapters.texts.dialogue import FILLER, render
from oval_adapters.texts.facts import SENTENCES, SPLITS, key_values
from oval_adapters.texts.retrieval import FAMILIES, asking_order, retrieval_passages
from oval_adapters.texts.running_text import RunningText, cut_places, tokenize
from oval_adapters.texts.tokens import encode, start_ids
from oval_core.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TURN = re.compile(r"<\|(user|assistant)\|>\n(.*?)</s>\n", re.DOTALL)
CONTEXT, STEPS = 1500, 300


def sentences(count: int) -> str:
    rng = random.Random(5)
    words = ["river", "stone", "light", "market", "winter", "paper", "garden"]
    return " ".join(f"The {' '.join(rng.choices(words, k=6))} was nr {i}." for i in range(count))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, text = tmp_path_factory.mktemp("texts"), sentences(200)
    rows = {
        "qa.jsonl": [
            {"question": q, "answer": text[i : i + 90]} for i, q in enumerate(text.split(".")[:60])
        ],
        "turns.jsonl": [{"turns": text[i * 400 :].split(".")[:4]} for i in range(20)],
        "kv.jsonl": [
            {"ordered_kv_records": [[f"key {j} of {i}", f"value {i * 9 + j}"] for j in range(9)]}
            for i in range(40)
        ],
    }
    for name, content in rows.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    (folder / "run.txt").write_text(text)
    return {name: folder / name for name in (*rows, "run.txt")}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(save_checkpoint(tmp_path_factory.mktemp("m"), TEMPLATE))


def make(tokenizer: Any, path: Any, *kinds: str, **changes: Any) -> list[Passage]:
    sizes = {"context": CONTEXT, "steps": STEPS, "count": 5, "seed": 3}
    return passages(kinds or KINDS, path, tokenizer, **{**sizes, **changes})


def assert_facts_are_where_said(tokenizer: Any, passage: Passage) -> None:
    prompt = tokenizer.decode(passage.prompt_ids)
    continuation = tokenizer.decode(passage.continuation_ids)
    for (start, end), (first, last) in zip(passage.answers, passage.sources, strict=True):
        value = tokenizer.decode(passage.continuation_ids[start:end]).strip()
        assert value == tokenizer.decode(passage.prompt_ids[first:last]).strip() != ""
        before = tokenizer.decode(passage.continuation_ids[:start]).rstrip()
        asked = re.split(r'\n|: "', before)[-1].removeprefix("Answer: ")
        if "lives in" in asked:  # the name stands before the pronoun
            city = re.fullmatch(r"The person who lives in (\w+) is", asked)[1]
            said = tokenizer.decode(passage.prompt_ids[first:])
            assert re.match(rf" ?{value} sells \w+\. (She|He) lives in {city}\.", said)
        else:
            said = tokenizer.decode(passage.prompt_ids[:last]).removesuffix(value).rstrip(' "')
            wanted = (
                asked if "Key" not in before else before.rsplit('Key: "', 1)[1].split('"')[0] + '":'
            )
            assert said.endswith(wanted)
            assert prompt.count(f"{wanted} {value}") <= 1
        assert value in continuation


@pytest.mark.parametrize("name", ["run.txt", "qa.jsonl", "turns.jsonl", "kv.jsonl"])
def test_every_kind_from_every_file_has_exact_lengths(
    tokenizer: Any, files: dict[str, Path], name: str
) -> None:
    made = make(tokenizer, files[name], count=len(FAMILIES), repeat=True)
    assert [p.kind for p in made] == [kind for kind in KINDS for _ in FAMILIES]
    assert len({p.name for p in made}) == len(made)
    for passage in made:
        assert passage.prompt_ids.shape == (CONTEXT,), passage.name
        assert passage.continuation_ids.shape == (STEPS,), passage.name
        assert passage.prompt_ids.dtype == passage.continuation_ids.dtype == torch.int64
        assert bool(passage.answers) == (passage.kind == "retrieval"), passage.name
        assert_facts_are_where_said(tokenizer, passage)


def test_same_seed_same_passages(tokenizer: Any, files: dict[str, Path]) -> None:
    def rows(seed: int) -> list[list[int]]:
        made = make(tokenizer, files["run.txt"], seed=seed)
        return [torch.cat([p.prompt_ids, p.continuation_ids]).tolist() for p in made]

    once = rows(1)
    assert once == rows(1)
    assert all(one != other for one, other in zip(once, rows(2), strict=True))


def test_several_files_share_the_count(tokenizer: Any, files: dict[str, Path]) -> None:
    both = [files["run.txt"], files["turns.jsonl"]]
    names = [p.name for p in make(tokenizer, both, "text", "retrieval", count=3, repeat=True)]
    assert [n.split(" of ")[1] for n in names] == ["run.txt", "run.txt", "turns.jsonl"] * 2
    assert len(set(names)) == 6


def test_prompt_and_continuation_are_one_text(tokenizer: Any, files: dict[str, Path]) -> None:
    text = read_source(files["run.txt"]).text
    for passage in make(tokenizer, files["run.txt"], "text"):
        whole = tokenizer.decode(torch.cat([passage.prompt_ids, passage.continuation_ids]))
        assert whole in text


@pytest.mark.parametrize("family", SENTENCES)
def test_training_and_test_share_no_word_of_a_fact(family: str) -> None:
    words: dict[str, set[str]] = {}
    for split in SPLITS:
        made = [SENTENCES[family](random.Random(seed), split, 12, "") for seed in range(40)]
        told = " ".join(fact.statement for facts in made for fact in facts)
        words[split] = set(re.findall(r"\w+", told))
    shared = words["train"] & words["test"]
    frame = re.findall(r"\w+", "The secret code of is. sells. She He lives in.")
    assert not {word for word in shared if not word.isdigit()} - set(frame)
    assert len(words["train"]) > 20


def test_pools_have_no_doubles() -> None:
    f = facts_module
    assert len({*f._CITIES, *f._WOMEN, *f._MEN, *f._GOODS}) == sum(
        map(len, (f._CITIES, f._WOMEN, f._MEN, f._GOODS))
    )


def test_key_values_come_from_lists_of_their_split_then_are_random() -> None:
    lists = tuple(((f"k{i}", f"v{i}"),) for i in range(8))
    for split, places in zip(SPLITS, ({0, 2, 4, 6}, {1, 3, 5, 7}), strict=True):
        made = [key_values(random.Random(seed), split, 2, lists) for seed in range(30)]
        assert {facts[0].value for facts in made} == {f"v{i}" for i in places}
        assert all(re.fullmatch(r"[0-9a-f-]{36}", facts[1].value) for facts in made)


def test_names_of_the_text_are_left_out() -> None:
    used = "Alice Carol Emma Bob Frank"
    for seed in range(20):
        facts = SENTENCES["names"](random.Random(seed), "train", 12, used)
        assert not {fact.statement.split()[0] for fact in facts} & set(used.split())


def test_every_fact_is_asked_once_a_round() -> None:
    order = asking_order(random.Random(0), 5, seen=2)
    rounds = [next(order) for _ in range(4)], [next(order) for _ in range(5)]
    assert sorted(rounds[0]) == [0, 1, 3, 4]
    assert sorted(rounds[1]) == [0, 1, 2, 3, 4]


def turns_of(tokenizer: Any, passage: Passage) -> list[tuple[str, str]]:
    whole = tokenizer.decode(torch.cat([passage.prompt_ids, passage.continuation_ids]))
    *full, cut = TURN.split(whole)
    assert [part for part in full[::3] if part] == [], "something stands between turns"
    assert "</s>\n" not in cut
    return list(zip(full[1::3], full[2::3], strict=True))


@pytest.mark.parametrize("name", ["run.txt", "qa.jsonl", "turns.jsonl"])
def test_chats_are_well_formed(tokenizer: Any, files: dict[str, Path], name: str) -> None:
    for passage in make(tokenizer, files[name], "chat", repeat=True):
        roles = [role for role, _ in turns_of(tokenizer, passage)]
        assert roles == [("user", "assistant")[i % 2] for i in range(len(roles))]
        assert len(roles) >= 3
        assert tokenizer.decode(passage.prompt_ids).endswith("</s>\n<|assistant|>\n")


def test_later_turns_ask_about_the_first(tokenizer: Any, files: dict[str, Path]) -> None:
    text = tokenize(tokenizer, "run", read_source(files["run.txt"]).text)
    sizes = {"context": CONTEXT, "steps": STEPS, "count": 6, "seed": 0}
    for passage in retrieval_passages(text, tokenizer, split="test", families=["turns"], **sizes):
        (_, first), (_, answer), (_, question), *_ = turns_of(tokenizer, passage)
        assert tokenizer.decode(passage.prompt_ids).endswith(f"<|assistant|>\n{answer}</s>\n")
        assert not first.endswith(question), "the first question is not asked again at once"
        assert tokenizer.decode(passage.continuation_ids).startswith("<|user|>\n" + question)
        assert_facts_are_where_said(tokenizer, passage)


def test_without_a_template_turns_are_lines(tokenizer: Any, files: dict[str, Path]) -> None:
    plain = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    plain.chat_template = None
    (passage,) = make(plain, files["qa.jsonl"], "chat", count=1)
    assert plain.decode(passage.prompt_ids).startswith("User: ")
    assert plain.decode(passage.prompt_ids).endswith("\n\nAssistant: ")


def test_a_template_that_changes_turns_is_refused(tokenizer: Any) -> None:
    shouting = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    shouting.chat_template = TEMPLATE.replace("m['content']", "m['content'] | upper")
    with pytest.raises(ConfigError, match="changes the turn"):
        render(shouting, [FILLER, "small"], 1, asked=True)
    shouting.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(ConfigError, match="refused the turns: no such role"):
        render(shouting, [FILLER, "small"], 1, asked=True)


def test_places_cover_the_text_and_repeat_on_demand() -> None:
    text = RunningText("t", list(range(100)), [40, 80])
    assert cut_places(text, 10, 4, None, repeat=False)[1] == [0, 30, 60, 90]
    for seed in range(20):
        places = cut_places(text, 10, 3, seed, repeat=False)[1]
        assert [p // 30 for p in places] == [0, 1, 2]
    longer, places = cut_places(text, 250, 2, None, repeat=True)
    assert longer.ids == list(range(100)) * 3
    assert longer.ends == [40, 80, 140, 180, 240, 280]
    assert places == [0, 50]
    window = longer.window(130, 60)
    assert (window.ids[0], window.ends) == (30, [10, 50])
    assert window.sentence_end(30, limit=60) in (10, 50)
    assert window.sentence_end(35, limit=40) == 10


def test_sentences_end_where_a_mark_and_a_space_follow(tokenizer: Any) -> None:
    text = "It cost 3.5 crowns. Why? So it is\nThe end."
    ends = tokenize(tokenizer, "t", text).ends
    assert [text[:end].split()[-1] for end in ends] == ["crowns.", "Why?", "is"]


def test_tokens_before_every_text_and_slow_tokenizers(tokenizer: Any) -> None:
    assert start_ids(tokenizer) == []
    assert start_ids(
        lambda text, add_special_tokens=True: {"input_ids": [1] * add_special_tokens + [9]}
    ) == [1]
    with pytest.raises(ConfigError, match="fast tokenizers"):
        encode(SimpleNamespace(is_fast=False), "text")


@pytest.mark.parametrize("flavour", ["single", "later"])
def test_passkeys_lie_at_their_depth(tokenizer: Any, files: dict[str, Path], flavour: str) -> None:
    text, depths = read_source(files["run.txt"]).text, [0.0, 0.5, 1.0]
    arguments = {"context": 1000, "depths": depths, "count": 6, "seed": 1, "flavour": flavour}
    cases = passkey_cases(text, tokenizer, num_codes=3, **arguments)
    assert [case.depth for case in cases] == depths * 2
    for case in cases:
        prompt = tokenizer.decode(case.prompt_ids)
        assert len(case.prompt_ids) == case.context == 1000
        assert len(re.findall(r"The secret code of \w+ is \d{5}\.", prompt)) == 3
        assert prompt.endswith(case.first.text)
        assert prompt.count(case.code) == 1
        first, last = case.judged.place
        assert tokenizer.decode(case.prompt_ids[first:last]) == case.code
        assert abs(first / (1000 - len(case.first.ids)) - case.depth) < 0.25
        assert f"{case.judged.text.split('Answer: ')[1]} {case.code}." in prompt
        if flavour == "later":
            follows = tokenizer.decode(case.later_ids())
            assert follows == f" {case.first.code}.{case.judged.text}"
            assert case.first.code != case.code
    same = passkey_cases(text, tokenizer, num_codes=3, **arguments)
    assert [c.code for c in cases] == [c.code for c in same]
    assert all(torch.equal(a.prompt_ids, b.prompt_ids) for a, b in zip(cases, same, strict=True))


@pytest.mark.parametrize(
    ("generated", "right"),
    [
        (" 48213.\n", True),
        (" the number 48213", True),
        (" 482130", False),
        (" 1 48213", False),
        ("", False),
    ],
)
def test_grade_reads_the_first_number(generated: str, right: bool) -> None:
    assert grade(generated, "48213") is right


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": ["txt"]}, "kinds: got 'txt'; did you mean 'text'"),
        ({"kinds": []}, "kinds, data: got none"),
        ({"split": "valid"}, "split: got 'valid'; .*Allowed: test, train"),
        ({"steps": 0}, "steps: got 0"),
        ({"kinds": ["text"], "context": 90_000}, r"with [0-9,]+ tokens, 90,300 are needed"),
        ({"kinds": ["chat"], "steps": 90_000}, r"with turns of [0-9,]+ tokens, 91,564 are needed"),
        ({"kinds": ["chat"], "context": 60}, r"chat template has no room. Allowed: \d+ or more"),
        ({"kinds": ["retrieval"], "context": 40}, "in which no fact has room"),
    ],
)
def test_bad_requests(tokenizer: Any, files: dict[str, Path], changes: dict, message: str) -> None:
    arguments = {"kinds": KINDS, "context": CONTEXT, "steps": STEPS, "count": 5, "seed": 3}
    with pytest.raises(ConfigError, match=message):
        passages(paths=files["run.txt"], tokenizer=tokenizer, **{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flavour": "latter"}, "did you mean 'later'"),
        ({"depths": [0.5, 1.5]}, "depths: got"),
        ({"depths": []}, "depths: got"),
        ({"num_codes": 1, "flavour": "later"}, "num_codes: got 1"),
        ({"context": 80}, r"too small for 2 codes and a question. Allowed: \d+ or more"),
        ({"context": 10**6}, "1,000,000 are needed"),
        ({"text": " "}, "text: got none"),
    ],
)
def test_bad_passkey_requests(tokenizer: Any, changes: dict, message: str) -> None:
    arguments = {"text": sentences(50), "context": 500, "depths": [0.5], "count": 1, "seed": 0}
    with pytest.raises(ConfigError, match=message):
        passkey_cases(tokenizer=tokenizer, **{**arguments, **changes})


@pytest.mark.smol
def test_real_tokenizer(files: dict[str, Path]) -> None:
    smol = load_tokenizer("smol")
    for passage in make(
        smol, files["run.txt"], context=600, steps=120, count=len(FAMILIES), repeat=True
    ):
        assert (len(passage.prompt_ids), len(passage.continuation_ids)) == (600, 120)
        assert bool(passage.answers) == (passage.kind == "retrieval"), passage.name
        assert_facts_are_where_said(smol, passage)
        if passage.kind == "chat":
            prompt = smol.decode(passage.prompt_ids)
            assert prompt.startswith("<|im_start|>system\n")
            assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
            assert prompt.count("<|im_start|>") == prompt.count("<|im_end|>") + 1
