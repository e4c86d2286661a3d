"""DSPy: calls, and a signature with typed outputs by its JSON adapter."""

from __future__ import annotations

from typing import Literal

import dspy
from checks import CAPITAL, KEY, MODEL, QUESTION, URL, check, main


class Served(dspy.LM):
    """A model that no catalogue lists: what its server supports is said here."""

    @property
    def supports_response_schema(self) -> bool:
        return True

    @property
    def supported_params(self) -> set[str]:
        return {*super().supported_params, "response_format"}


lm = Served(
    f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, max_tokens=200, temperature=0.0, cache=False, num_retries=0
)


class Forecast(dspy.Signature):
    """Choose the city and the number of days."""

    question: str = dspy.InputField()
    city: Literal["Oslo", "Paris", "Rome"] = dspy.OutputField()
    sunny: bool = dspy.OutputField()


@check
def lm_call() -> None:
    [answer] = lm(CAPITAL, max_tokens=24)
    assert answer


@check
def json_adapter() -> None:
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        prediction = dspy.Predict(Forecast)(question=QUESTION)
    assert prediction.city in ("Oslo", "Paris", "Rome")
    assert isinstance(prediction.sunny, bool)


main()
