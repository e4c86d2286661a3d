"""XLM-RoBERTa: BERT's layers, with positions after the id of the padding token."""

from __future__ import annotations

from functools import partial

from sglang_jax.architectures.bert_form import NAMES, configure_roberta, without_head
from sglang_jax.architectures.registry import Family

_NAME = "xlm-roberta"

FAMILY = Family(
    name=_NAME,
    class_name="XLMRobertaForMaskedLM",
    configure=partial(configure_roberta, _NAME),
    names=NAMES,
    without_head=without_head,
)
