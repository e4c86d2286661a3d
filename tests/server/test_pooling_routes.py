"""The routes for vectors and scores, over whole engines of tiny models."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from helpers.echo_server import EchoServer, serve_echo
from helpers.tiny_models import make_tiny_checkpoint, make_tiny_tokenizer, randomise, tiny_fields

from sglang_jax.engine.model_core import load_core, load_text_tokenizer

TEXTS = ["the quick brown fox", "what is the capital of france?", "a"]
OPTIONS: dict[str, Any] = {
    "backend": "torch",
    "device": "cpu",
    "dtype": "float32",
    "skip_warmup": True,
    "context_length": 256,
    "max_running_requests": 4,
}


def serve(folder: Path, **options: Any) -> Any:
    return serve_echo(load_core, load_text_tokenizer, model_path=str(folder), **OPTIONS | options)


@pytest.fixture(scope="module")
def generating(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("generates"))


@pytest.fixture(scope="module")
def embedding(generating: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoServer]:
    with serve(generating, model_task="embed", files_dir=tmp_path_factory.mktemp("files")) as server:
        yield server


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EchoServer, Path]]:
    """A classifier with one label."""
    folder = tmp_path_factory.mktemp("ranks")
    config = transformers.AutoConfig.for_model("llama", **tiny_fields("llama"), id2label={0: "fits"})
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    randomise(model, "llama").save_pretrained(folder)
    make_tiny_tokenizer(folder)
    with serve(folder) as server:
        yield server, folder


def post(server: EchoServer, path: str, **body: Any) -> Any:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def error(server: EchoServer, path: str, **body: Any) -> tuple[str, str]:
    response = server.http.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"], response.json()["error"]["message"]


def vectors(folder: Path, texts: list[str]) -> np.ndarray:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        last = [model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0, -1] for text in texts]
    return torch.nn.functional.normalize(torch.stack(last), dim=-1).numpy()


def test_the_server_says_what_its_model_gives(embedding: EchoServer, ranking: tuple[EchoServer, Path]) -> None:
    """The page and other clients choose by these what they offer."""
    for server, name, route, abilities in (
        (embedding, "vectors", "/v1/embeddings", ["embedding"]),
        (ranking[0], "labels", "/classify", []),
    ):
        assert server.http.get("/model_info").json()["is_generation"] is False
        told = server.http.get("/").json()
        assert told[name] == f"POST {route}"
        assert "chat" not in told
        post(server, route, input=TEXTS[0])
        assert post(server, "/api/show", model="default")["capabilities"] == abilities


def test_openai_client_gets_vectors(embedding: EchoServer, generating: Path) -> None:
    client = openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none")
    expected = vectors(generating, TEXTS)
    plain = client.embeddings.create(model="default", input=TEXTS, encoding_format="float")
    packed = client.embeddings.create(model="default", input=TEXTS)  # the client asks for base64
    for answer in (plain, packed):
        found = [each.embedding for each in sorted(answer.data, key=lambda each: each.index)]
        np.testing.assert_allclose(found, expected, atol=1e-4)
    tokens = embedding.engine.tokenizer.encode
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == sum(len(tokens(text)) for text in TEXTS)
    ids = client.embeddings.create(model="default", input=[tokens(TEXTS[0])], dimensions=5)
    cut = expected[0][:5] / np.linalg.norm(expected[0][:5])
    np.testing.assert_allclose(ids.data[0].embedding, cut, atol=1e-4)


def test_bad_requests_for_vectors(embedding: EchoServer) -> None:
    assert error(embedding, "/v1/embeddings", input=["a", ""])[0] == "input"
    assert error(embedding, "/v1/embeddings", input="a", dimensions=65) == (
        "dimensions",
        "dimensions must be between 1 and 64, the numbers of this model's vectors, got 65",
    )
    assert error(embedding, "/v1/embeddings", input="a" * 3000)[0] == "input"
    assert error(embedding, "/v1/embeddings", input=[[1, 999]])[0] == "input"
    assert error(embedding, "/v1/embeddings", input="a", return_multivector=True)[0] == "return_multivector"
    assert "gives vectors" in error(embedding, "/v1/completions", prompt="a")[1]
    assert "no scores of labels" in error(embedding, "/classify", input="a")[1]


def test_an_aborted_request_for_a_vector_is_an_error(embedding: EchoServer) -> None:
    post(embedding, "/pause_generation", mode="in_place")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(error, embedding, "/v1/embeddings", input=TEXTS, rid="r1")
        while embedding.http.get("/v1/loads").json()["loads"][0]["num_waiting_reqs"] < len(TEXTS):
            time.sleep(0.01)
        assert embedding.http.post("/abort_request", json={"rid": "r1-1"}).status_code == 200
        post(embedding, "/continue_generation")
        assert "was aborted" in answer.result()[1]
    assert embedding.http.get("/model_info").json()["is_generation"] is False


def test_ranking_by_vectors(embedding: EchoServer, generating: Path) -> None:
    query, *documents = vectors(generating, [TEXTS[0], *TEXTS])
    expected = [float(query @ document) for document in documents]
    answer = post(embedding, "/v1/rerank", query=TEXTS[0], documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]], top_n=2)
    order = sorted(range(3), key=lambda place: -expected[place])
    assert [each["index"] for each in answer["results"]] == order[:2]
    assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[place] for place in order[:2]]
    found = [each["relevance_score"] for each in answer["results"]]
    np.testing.assert_allclose(found, [expected[place] for place in order[:2]], atol=1e-4)
    scored = post(embedding, "/v1/score", text_1=TEXTS[0], text_2=TEXTS)
    np.testing.assert_allclose([each["score"] for each in scored["data"]], expected, atol=1e-4)
    assert scored["scores"] == [each["score"] for each in scored["data"]]
    assert error(embedding, "/v1/score", text_1=TEXTS[:2], text_2=TEXTS)[0] == "text_1"
    assert error(embedding, "/v1/rerank", query="a", documents=["b"], top_n=0)[0] == "top_n"
    assert error(embedding, "/v1/score", query="a", items=["b"], text_2=["c"])[0] == "query"
    assert error(embedding, "/v1/score", text_1="a", text_2="b", items=["c"])[0] == "query"
    assert error(embedding, "/v1/score", query="a", items=["b"], item_first=True)[0] == "item_first"
    assert error(embedding, "/v1/score", query="a", items=["b"], apply_softmax=True)[0] == "apply_softmax"


def test_ranking_by_a_classifier(ranking: tuple[EchoServer, Path]) -> None:
    server, folder = ranking
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    query, documents = "th", ["e quick fox", *TEXTS[1:]]  # "the" is a token, but not of a pair
    with torch.no_grad():
        expected = [
            float(model(torch.tensor([tokenizer(query, text).input_ids])).logits.sigmoid()) for text in documents
        ]
    answer = post(server, "/rerank", query=query, documents=documents, return_documents=False)
    assert all("document" not in each for each in answer["results"])
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    np.testing.assert_allclose([found[place] for place in range(3)], expected, atol=1e-4)
    (classified,) = post(server, "/classify", input=tokenizer(query, documents[1]).input_ids)["data"]
    assert (classified["label"], classified["num_classes"]) == ("fits", 1)
    np.testing.assert_allclose(classified["probs"], expected[1:2], atol=1e-4)
    assert "no vectors" in error(server, "/v1/embeddings", input="a")[1]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_scores_of_tokens(backend: str, generating: Path) -> None:
    """Scores by a model that generates text, next to requests that sample."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(generating)
    model = transformers.AutoModelForCausalLM.from_pretrained(generating, dtype=torch.float32)
    labels = [5, 300, 7]
    with torch.no_grad():
        logprobs = [
            model(torch.tensor([tokenizer(TEXTS[0] + text).input_ids])).logits[0, -1].log_softmax(-1)[labels]
            for text in TEXTS
        ]
    with serve(generating, backend=backend) as server:
        body = {"query": TEXTS[0], "items": TEXTS, "label_token_ids": labels}
        plain = post(server, "/v1/score", **body)["scores"]
        np.testing.assert_allclose(plain, [each.exp().numpy() for each in logprobs], atol=1e-4)
        shares = post(server, "/v1/score", **body, apply_softmax=True)["scores"]
        np.testing.assert_allclose(shares, [each.softmax(-1).numpy() for each in logprobs], atol=1e-4)
        assert error(server, "/v1/score", **{**body, "label_token_ids": [999]})[0] == "label_token_ids"
        param, message = error(server, "/v1/rerank", query="a", documents=["b"])
        assert (param, "2 tokens" in message or "3 tokens" in message) == ("model", True)  # "yes" is not one token here
        assert post(server, "/v1/completions", prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_batches_of_vectors(embedding: EchoServer, generating: Path) -> None:
    lines = [
        {"custom_id": f"t{place}", "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
        for place, text in enumerate(TEXTS)
    ]
    client = openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none")
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    for _ in range(600):
        batch = client.batches.retrieve(batch.id)
        if batch.status in ("completed", "failed"):
            break
        time.sleep(0.05)
    assert batch.status == "completed", batch
    assert batch.output_file_id is not None
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    found = {each["custom_id"]: each["response"]["body"]["data"][0]["embedding"] for each in answers}
    np.testing.assert_allclose([found[f"t{place}"] for place in range(3)], vectors(generating, TEXTS), atol=1e-4)
