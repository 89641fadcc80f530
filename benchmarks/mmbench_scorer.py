"""Compares our MMBench and VQA scoring with VLMEvalKit's own functions, row by row, on synthetic answers of awkward kinds.

    pip download ms-vlmeval --no-deps && unzip ms_vlmeval-*.whl -d KIT
    python -m venv ENV && ENV/bin/pip install pandas openpyxl pillow tabulate tqdm rich portalocker sty json_repair openai validators xlsxwriter
    python benchmarks/mmbench_scorer.py --package KIT --python ENV/bin/python [--groups 600] [--seed 0]

Both sides read the same table. Compared: letter and hit of each row, circular hit of each question, the report, both prompts,
and the soft accuracy of short answers. Prints JSON on the last line; exits with 1 if anything differs that is not intended.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from oval_mm.mmbench import PASS_STEP, Question, read_mmbench
from oval_mm.mmbench_report import figures, judge, table
from oval_mm.prompts import choice_prompt
from oval_mm.vqa_answers import normalise, score

OTHER_SIDE = Path(__file__).with_name("mmbench_scorer_kit.py")
COLUMNS = [
    "index",
    "question",
    "hint",
    "A",
    "B",
    "C",
    "D",
    "E",
    "answer",
    "category",
    "image",
    "l2-category",
    "split",
]
TEXTS = (
    "a cat", "a dog", "cat", "the cat sat", "red", "dark red", "3", "4.5", "None", "NA", "nan", "Yes", "No", "A", "B", "b", "C and D",
    "left of the 'table'", 'say "hi"', "two\tparts", "one\nmore line", "é́", "İstanbul", "ISTANBUL", "图中的猫", "12,000", "(B)", "A. x",
    "Sorry, I can't help with images of people yet.", "an answer that is rather long and says a good deal of things", "...", "Z", " spaced ",
)  # fmt: skip
FORMS = (
    "{L}", "{L}.", "({L})", "{L})", "[{L}]", "**{L}**", "<{L}>", '"{L}"', "'{L}'", "{l}", "{L}/{M}", "{L} or {M}", "{L}, {M}", "{L}{M}",
    "The answer is {L}", "The answer is {L}.", "Answer: {L}", "{L}: {T}", "{L}. {T}", "{T}", "{T}.", "{TU}", "I think it is {T}",
    "It is {T}, not {S}", "{L} because the image shows {T}", "{L} because it is so and not otherwise at all", "the option {L} is right",
    "so {L} it must be then", "so {L} it must be then I say", "A picture of {T}", "A {T}", "a {T}", "It may be {L} or {L}", "Z", "Z.", "none",
    "None", "nan", "", " ", "\n{L}\n", "{L}\n{T}", "Option {L}: {T}. The others are wrong.", "Cannot determine the answer", "I can't process this file. {L}",
    "I'm sorry, but without the image provided, {L}", "Failed to obtain answer via API. {L}", "Failed to obtain answer via API: {T}", "clearly the cat",
    "{S}", "{L} {L} {L}", "#{L}#", "{{{L}}}", "{L}!", "{L};{M}", "{L}?", "`{L}`", "{L}\u3002", "\u7b54\u6848\u662f{L}", "\u7b54\u6848\u662f {L} \u3002",
    "E", "{L}-{T}", "_{L}_", "{T} {T} {T} {T} {T} {T} {T} {T} {T} {T}", "x y z {L} 1 2 3", "x y z {L} 1 2 3 4", "A B C D", "I", "{L}\u00a0",
)  # fmt: skip
WORDS = (
    "yes", "no", "two", "2", "2.", "2.0", "1,000", "a dog", "the dog", "dog", "dogs", "dont", "don't", "youre", "couldn'tve", "red/blue",
    "red blue", "t-shirt", "t shirt", "none", "0", "10:30", "it's", "its", "Yes.", "no!", "(left)", "left ", "ten", "an", "U.S.A.", "$5", "5%",
    "black & white", "black and white", "stop.sign", "hello,world", "a", "1 , 000", "3,4 ;5", "somebody'd", "what?", "x.", "y .", "..", "left\nright",
)  # fmt: skip


def main() -> None:
    """Builds the cases, runs both sides, compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", required=True, help="folder that holds vlmeval/")
    parser.add_argument("--python", required=True, help="of an environment with its packages")
    parser.add_argument("--groups", type=int, default=600, help="questions")
    parser.add_argument("--vqa", type=int, default=3000, help="short answers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "MMBench_synthetic.tsv"
        write_table(data, rng, options.groups)
        file = read_mmbench(data)
        groups = sorted({question.group for question in file.questions})
        sure = {group for group in groups if rng.random() < 0.4}
        answers = {q.index: answer_of(q, rng, q.group in sure) for q in file.questions}
        shorts = [short_case(rng) for _ in range(options.vqa)]
        request = {
            "data": str(data),
            "answers": {str(index): answer for index, answer in answers.items()},
            "package": options.package,
            "shorts": shorts,
        }
        command = [options.python, str(OTHER_SIDE)]
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    theirs = json.loads(done.stdout.splitlines()[-1])
    result = compare(file.questions, answers, shorts, theirs)
    result |= {"bad_rows": len(file.bad_rows), "seed": options.seed, "kit": theirs["kit"]}
    print(json.dumps(result))
    sys.exit(any(result["differences"].values()))


def compare(
    questions: Any, answers: dict[int, str], shorts: list[Any], theirs: dict[str, Any]
) -> dict[str, Any]:
    """Returns counts, and every difference."""
    verdicts = [judge(question, answers[question.index]) for question in questions]
    found = figures(verdicts, circular=True)
    differences: dict[str, list[Any]] = {
        name: [] for name in ("letter", "hit", "circular", "report", "prompt", "vqa")
    }
    circular = dict.fromkeys((v.question.group for v in verdicts), True)
    for verdict in verdicts:
        index = str(verdict.question.index)
        other = theirs["rows"][index]
        circular[verdict.question.group] &= bool(verdict.hit)
        if (verdict.letter, verdict.rule == "nothing") != (other["letter"], not other["inferred"]):
            differences["letter"].append([answers[verdict.question.index], dict(verdict.question.options), verdict.letter, other["letter"]])  # fmt: skip
        if int(bool(verdict.hit)) != other["hit"]:
            differences["hit"].append([index, verdict.hit, other["hit"]])
        for style in ("llava", "generic"):
            q = verdict.question
            if choice_prompt(q.question, q.hint, q.options, style) != other[style]:
                differences["prompt"].append([style, choice_prompt(q.question, q.hint, q.options, style), other[style]])  # fmt: skip
    for group, hit in circular.items():
        if int(hit) != theirs["circular"].get(str(group)):
            differences["circular"].append([group, hit, theirs["circular"].get(str(group))])
    for name, circ in (("vanilla", False), ("circular", True)):
        ours = sorted(table(verdicts, circular=circ), key=lambda row: row["split"])
        if not same_report(ours, theirs["report"][name]):
            differences["report"].append([name, ours, theirs["report"][name]])
    intended = compare_vqa(shorts, theirs["shorts"], differences["vqa"])
    return {
        "rows": len(verdicts),
        "questions": len(circular),
        "distinct_answers": len(set(answers.values())),
        "rules": dict(Counter(v.rule for v in verdicts)),
        "hits": sum(bool(v.hit) for v in verdicts),
        "circular_hits": found.circular.hits if found.circular else 0,
        "reports_compared": 2,
        "prompts_compared": 2 * len(verdicts),
        "vqa_answers": len(shorts),
        "vqa_intended": intended,
        "differences": differences,
    }


def compare_vqa(shorts: list[Any], theirs: list[Any], wrong: list[Any]) -> int:
    """Adds what differs to `wrong`; returns how many differ by intention: the kit keeps a period after a digit."""
    intended = 0
    for (answer, truths), other in zip(shorts, theirs, strict=True):
        ours = score(answer, truths)
        if ours.normal == other["normal"] and abs(ours.score - other["score"]) < 1e-9:
            continue
        if any(re.search(r"\d\.(?!\d)", text) for text in (answer, *truths)):
            intended += 1
        else:
            wrong.append([answer, truths, ours.normal, normalise(truths[0]), ours.score, other])
    return intended


def same_report(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    """Whether two reports have the same columns in the same order, and the same values."""
    theirs = sorted(theirs, key=lambda row: row["split"])
    if [list(row) for row in ours] != [list(row) for row in theirs]:
        return False
    pairs = [(a[key], b[key]) for a, b in zip(ours, theirs, strict=True) for key in a if key != "split"]  # fmt: skip
    return all(a == b if None in (a, b) else abs(a - b) < 1e-12 for a, b in pairs)


def write_table(path: Path, rng: random.Random, groups: int) -> None:
    """Writes questions with rolled rows in MMBench's form: some rows are missing, images are references where they repeat."""
    kinds = [("coarse_perception", "image_scene"), ("logic_reasoning", "future_prediction"), ("own_kind", "ocr")]  # fmt: skip
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        for index in range(groups):
            wide, narrow = rng.choice(kinds)
            texts = rng.sample(TEXTS, rng.choice([2, 3, 4, 4, 4, 5]))
            known = [place for place, text in enumerate(texts) if text not in ("None", "NA", "nan")]
            if not known:
                continue
            right, split = rng.choice(known), rng.choice(["dev", "dev", "test"])
            image = "/9j/" + "A" * 80 + str(index)
            for step in range(len(texts)):
                if step and rng.random() < 0.05:
                    continue  # a rolled row that is not there
                rolled = texts[-step:] + texts[:-step] if step else texts
                row = {
                    "index": index + step * PASS_STEP,
                    "question": rng.choice(["What is it?", "图里是什么？", 'Is it "so"?', "Two\nlines?"]),
                    "hint": rng.choice(["", "", "Look at it.", "NA"]),
                    **dict(zip("ABCDE", rolled, strict=False)),
                    "answer": "ABCDE"[(right + step) % len(texts)],
                    "category": narrow,
                    "image": index if step else image,
                    "l2-category": wide,
                    "split": split,
                }  # fmt: skip
                writer.writerow(row)


def answer_of(question: Question, rng: random.Random, is_sure: bool) -> str:
    """Returns an answer of some awkward kind; half of them mean the right option, and of a sure question nearly all."""
    letters = list(question.options)
    if is_sure and rng.random() < 0.9:
        return rng.choice(FORMS[:6]).format(L=question.answer)
    letter = question.answer if question.answer and rng.random() < 0.5 else rng.choice(letters)
    other = rng.choice(letters)
    text = question.options[letter]
    return rng.choice(FORMS).format(
        L=letter, l=letter.lower(), M=other, T=text, TU=text.upper(), S=question.options[other]
    )


def short_case(rng: random.Random) -> tuple[str, list[str]]:
    """Returns an answer and what ten people said."""
    few = rng.sample(WORDS, rng.choice([1, 2, 3, 4]))
    truths = [rng.choice(few) for _ in range(10)]
    return rng.choice([*few, rng.choice(WORDS)]), truths


if __name__ == "__main__":
    main()
