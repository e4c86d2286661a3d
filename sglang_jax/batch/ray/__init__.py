"""Offline batches over many machines by Ray Data, which reads, spreads, retries and writes; engines of ours answer.

>>> import ray
>>> from sglang_jax.batch.ray import Answering, answer_rows
>>> from sglang_jax.config import ServerConfig
>>> rows = ray.data.read_parquet("s3://bucket/prompts/")
>>> answers = answer_rows(rows, Answering(config=ServerConfig(model_path="demo")))
>>> answers.write_parquet("s3://bucket/answers/")

Neither this nor what it imports needs jax or torch; the actors' engines do, in processes of their own. It needs Ray:
the extra `ray`.
"""

from sglang_jax.batch.ray.actors import ANSWER_COLUMNS, REQUEST_COLUMNS, Answering, AnswerRows, Attempts, SharedAttempts
from sglang_jax.batch.ray.engine import Asking
from sglang_jax.batch.ray.pipeline import answer_rows, pool_of_engines
from sglang_jax.batch.ray_options import RayOptions

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
