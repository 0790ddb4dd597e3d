"""What the newest SDK can ask about prompts and tokens, and what it gets."""

import numpy as np
import pytest
import tinker
from support.node import MODEL
from tinker import types

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def sampler(url: str) -> tinker.SamplingClient:
    service = tinker.ServiceClient(base_url=url, api_key="tml-scores")
    return service.create_sampling_client(base_model=MODEL)


def ask(sampler: tinker.SamplingClient, **asked: object) -> types.SampleResponse:
    params = types.SamplingParams(max_tokens=3, seed=1, stop=[])
    prompt = types.ModelInput.from_ints(PROMPT)
    return sampler.sample(prompt, 2, params, **asked).result()


def test_everything_at_once(sampler: tinker.SamplingClient) -> None:
    ids = np.array([[1, -1], [2, 3], [-1, -1], [4, 511]])
    got = ask(
        sampler,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=4,
        target_prompt_logprobs=types.TensorData.from_numpy(ids),
        prompt_alt_tokens_k=3,
        prompt_logprobs_last_n=2,
    )
    top = got.sequences[1].topk_logprobs
    assert top is not None
    assert [len(row or ()) for row in top] == [4, 4, 4]
    assert all(row == sorted(row, key=lambda pair: -pair[1]) for row in top if row)
    assert got.prompt_logprobs is not None
    assert [p is None for p in got.prompt_logprobs] == [True, True, True, False, False]
    assert got.topk_prompt_logprobs is not None
    assert [p is None for p in got.topk_prompt_logprobs] == [True, True, True, False, False]
    targets = got.target_prompt_logprobs
    assert targets is not None
    table = targets.to_numpy()
    assert table.shape == (4, 2)
    assert ((table == 0) == (ids == -1)).all()
    alt = got.prompt_alt_tokens
    assert alt is not None
    assert alt.tokens.to_numpy().shape == alt.logprobs.to_numpy().shape == (4, 3)
    assert alt.tokens.dtype == "int64"


def test_named_tokens_agree_with_the_prompts_own(sampler: tinker.SamplingClient) -> None:
    torch = pytest.importorskip("torch")
    ids = torch.full((4, 6), -1)
    ids[:, 2] = torch.tensor(PROMPT[1:])
    got = ask(
        sampler,
        include_prompt_logprobs=True,
        target_prompt_logprobs=types.TensorData.from_torch_sparse(ids, pad_value=-1),
    )
    targets = got.target_prompt_logprobs
    assert targets is not None
    assert targets.sparse_crow_indices is not None
    assert got.prompt_logprobs is not None
    assert targets.to_torch().to_dense()[:, 2].tolist() == got.prompt_logprobs[1:]


def test_too_many_are_refused(sampler: tinker.SamplingClient) -> None:
    with pytest.raises(Exception, match="topk_sample_logprobs must be from 0 to 128, got 129"):
        ask(sampler, topk_sample_logprobs=129)
