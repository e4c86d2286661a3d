"""RoBERTa: BERT's layers, with positions after the id of the padding token."""

from __future__ import annotations

from functools import partial

from sglang_jax.architectures.bert_form import CLASSIFIER, ROBERTA_NAMES, configure_roberta, roberta_without_head
from sglang_jax.architectures.registry import Family

_NAME = "roberta"

FAMILY = Family(
    name=_NAME,
    class_name="RobertaForMaskedLM",
    configure=partial(configure_roberta, _NAME),
    names=ROBERTA_NAMES,
    classifier=CLASSIFIER,
    without_head=roberta_without_head,
)
