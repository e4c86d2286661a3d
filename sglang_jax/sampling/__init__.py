from sglang_jax.sampling.params import (
    MAX_LOGIT_BIAS as MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS as MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS as MAX_TOP_LOGPROBS,
    SamplingParams as SamplingParams,
)
