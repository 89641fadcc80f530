"""The other side of `mmbench_scorer.py`: VLMEvalKit's functions on the same cases. Runs in its own environment, without OVAL."""

from __future__ import annotations

import ast
import contextlib
import json
import string
import sys
import tempfile
import types
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    """Reads the cases from stdin as JSON, prints what VLMEvalKit says of them as JSON."""
    request = json.load(sys.stdin)
    root = Path(request["package"])
    for name in ("vlmeval", "vlmeval.dataset", "vlmeval.dataset.utils"):
        package = types.ModuleType(name)  # their own __init__ would import every benchmark
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    with contextlib.redirect_stdout(sys.stderr):
        found = answer(request, root)
    print(json.dumps(found))


def answer(request: dict[str, Any], root: Path) -> dict[str, Any]:
    """Returns letters, hits, reports, prompts and scores of short answers."""
    pandas = import_module("pandas")
    choices = import_module("vlmeval.dataset.utils.multiple_choice")
    short = import_module("vlmeval.dataset.utils.vqa_eval")
    smp = import_module("vlmeval.smp")
    meta = smp.load(request["data"])
    data = meta.drop(columns=["image"]).copy()
    data["prediction"] = [request["answers"][str(index)] for index in data["index"]]
    data = data.sort_values(by="index")
    prompts = {
        "generic": method(root / "vlmeval/dataset/image_mcq.py", "ImageMCQDataset", pandas, smp),
        "llava": method(root / "vlmeval/vlm/llava/llava.py", "LLaVA", pandas, smp),
    }
    rows: dict[str, Any] = {}
    for _, item in data.iterrows():
        rows[str(item["index"])] = {
            "letter": choices.extract_answer_from_item(None, item, "MMBench_DEV_EN")["opt"],
            "inferred": bool(choices.prefetch_answer(item)),
            **{style: prompt(item) for style, prompt in prompts.items()},
        }
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{name}.pkl" for name in ("vanilla", "circular")]
        vanilla = choices.mcq_vanilla_eval(None, data.copy(), meta, 1, paths[0], "MMBench_DEV_EN")
        circular = choices.mcq_circular_eval(None, data.copy(), meta, 1, paths[1], "MMBench_DEV_EN")
    for index, hit in zip(vanilla["index"], vanilla["hit"], strict=True):
        rows[str(index)]["hit"] = int(hit)
    scored = [short.process_line({"answer": str(truths), "prediction": text}) for text, truths in request["shorts"]]  # fmt: skip
    return {
        "rows": rows,
        "circular": {str(i): int(hit) for i, hit in zip(circular["index"], circular["hit"], strict=True)},
        "report": {"vanilla": listed(choices.report_acc(vanilla)), "circular": listed(choices.report_acc(circular))},
        "shorts": [{"normal": own["pred"], "score": sum(own["match"]) / len(own["match"])} for own in scored],
        "kit": sorted(path.name for path in root.glob("*.dist-info")),
    }  # fmt: skip


def listed(report: Any) -> list[dict[str, Any]]:
    """Returns a report as rows, None where there is no number."""
    return [{k: None if v != v else v for k, v in row.items()} for row in report.to_dict("records")]


def method(path: Path, owner: str, pandas: Any, smp: Any) -> Any:
    """Returns `build_prompt` of a class as a function of a row; its module imports too much to be loaded."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)  # fmt: skip
    (own,) = (n for n in body if isinstance(n, ast.FunctionDef) and n.name == "build_prompt")
    names: dict[str, Any] = {"string": string, "pd": pandas, "cn_string": smp.cn_string}
    exec(compile(ast.Module([own], []), str(path), "exec"), names)
    itself = types.SimpleNamespace(
        use_custom_prompt=lambda *_: True, dump_image=lambda *_: ["image"], meta_only=False
    )
    return lambda item: names["build_prompt"](itself, item)[-1]["value"]


if __name__ == "__main__":
    main()
