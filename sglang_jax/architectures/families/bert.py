"""BERT: see `bert_form`."""

from __future__ import annotations

from functools import partial

from sglang_jax.architectures.bert_form import CLASSIFIER, NAMES, configure_bert, without_head
from sglang_jax.architectures.registry import Family

_NAME = "bert"

FAMILY = Family(
    name=_NAME,
    class_name="BertForMaskedLM",
    configure=partial(configure_bert, _NAME),
    names=NAMES,
    classifier=CLASSIFIER,
    without_head=without_head,
)
