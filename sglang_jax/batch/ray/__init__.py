"""Offline batches on a Ray cluster. Ray Data reads, distributes, retries and writes; this project's engines answer.

>>> import ray
>>> from sglang_jax.batch.ray import Answering, answer_rows
>>> from sglang_jax.config import ServerConfig
>>> rows = ray.data.read_parquet("s3://bucket/prompts/")
>>> answers = answer_rows(rows, Answering(config=ServerConfig(model_path="demo")))
>>> answers.write_parquet("s3://bucket/answers/")

This package imports neither jax nor torch, which only the engines' processes need. It needs Ray: the extra `ray`.
"""

from sglang_jax.batch.options import RayOptions
from sglang_jax.batch.ray.actors import ANSWER_COLUMNS, REQUEST_COLUMNS, Answering, AnswerRows, Attempts, SharedAttempts
from sglang_jax.batch.ray.engine import Asking
from sglang_jax.batch.ray.pipeline import answer_rows, pool_of_engines

__all__ = [
    "ANSWER_COLUMNS",
    "REQUEST_COLUMNS",
    "AnswerRows",
    "Answering",
    "Asking",
    "Attempts",
    "RayOptions",
    "SharedAttempts",
    "answer_rows",
    "pool_of_engines",
]
