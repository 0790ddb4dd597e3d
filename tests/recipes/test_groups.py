"""The data that a group of answers becomes, against numbers worked out by hand."""

import numpy as np

from recipes.kit.groups import Answer, group_data

PROMPT = [10, 11, 12]


def answer(reward, tokens=(20, 21)):
    return Answer("…", tokens, [-0.5] * len(tokens), reward)


def inputs(datum):
    return {name: data.to_numpy().tolist() for name, data in datum.loss_fn_inputs.items()}


def test_targets_are_one_ahead_and_the_prompt_has_no_advantage():
    right, wrong = group_data(PROMPT, [answer(1.0, (20, 21)), answer(0.0, (22,))])
    assert right.model_input.to_ints() == [10, 11, 12, 20]
    assert inputs(right) == {
        "target_tokens": [11, 12, 20, 21],
        "logprobs": [0.0, 0.0, -0.5, -0.5],
        "advantages": [0.0, 0.0, 0.5, 0.5],
    }
    assert wrong.model_input.to_ints() == [10, 11, 12]
    assert inputs(wrong)["advantages"] == [0.0, 0.0, -0.5]


def test_advantages_of_a_group_sum_to_zero():
    data = group_data(PROMPT, [answer(r) for r in (1.0, 0.0, 0.0, 0.0)])
    last = [inputs(datum)["advantages"][-1] for datum in data]
    assert last == [0.75, -0.25, -0.25, -0.25]


def test_a_group_that_agrees_teaches_nothing():
    assert group_data(PROMPT, [answer(1.0)] * 4) == []
    assert group_data(PROMPT, [answer(0.0)] * 4) == []


def test_dtypes_are_the_wires():
    (datum, _) = group_data(PROMPT, [answer(1.0), answer(0.0)])
    dtypes = {name: data.to_numpy().dtype for name, data in datum.loss_fn_inputs.items()}
    assert dtypes == {
        "target_tokens": np.int64,
        "logprobs": np.float32,
        "advantages": np.float32,
    }
