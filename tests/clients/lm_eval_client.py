"""lm-eval: loglikelihoods and generations of a task of this test, tokenized by the server."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from checks import KEY, MODEL, URL, check, main
from lm_eval.tasks import TaskManager

QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "Oslo"], "answer": 0},
    {"question": "One, two, three,", "choices": ["purple", "four"], "answer": 1},
]
LIKELIHOOD = {
    "task": "choices",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}
GENERATION = {
    "task": "answers",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


def evaluate(task: dict[str, Any], model: str, route: str, **more: Any) -> list[dict[str, Any]]:
    """The samples of a task."""
    os.environ["OPENAI_API_KEY"] = KEY
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "questions.jsonl"
        data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(data)}, "test_split": "train"}
        (Path(folder) / f"{task['task']}.yaml").write_text(json.dumps({**task, **source}))
        results = lm_eval.simple_evaluate(
            model=model,
            model_args={
                "model": MODEL,
                "base_url": f"{URL}{route}",
                "tokenizer_backend": "remote",
                "auth_token": KEY,
                "num_concurrent": 2,
                "max_retries": 1,
            },
            tasks=[task["task"]],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            bootstrap_iters=0,
            **more,
        )
    samples: list[dict[str, Any]] = results["samples"][task["task"]]
    assert len(samples) == len(QUESTIONS)
    return samples


@check
def loglikelihood() -> None:
    for sample in evaluate(LIKELIHOOD, "local-completions", "/v1/completions"):
        assert [value < 0 for value, _ in sample["filtered_resps"]] == [True, True]
        assert sample["acc"] == 1.0, sample  # a small model knows this much


@check
def generation() -> None:
    for sample in evaluate(GENERATION, "local-completions", "/v1/completions"):
        assert sample["resps"][0][0], sample


@check
def chat_generation() -> None:
    samples = evaluate(GENERATION, "local-chat-completions", "/v1/chat/completions", apply_chat_template=True)
    assert all(sample["resps"][0][0] for sample in samples)


main()
