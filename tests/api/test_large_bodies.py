"""Bodies that take long to decode: beside the event loop, and in order all the same."""

import asyncio
import threading

from .conftest import Http


def body(model_id: str, seq: int, datums: int) -> dict:
    tokens = {"data": [1, 2, 3, 4], "dtype": "int64"}
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]},
        "loss_fn_inputs": {
            "target_tokens": tokens,
            "weights": {"data": [1.0] * 4, "dtype": "float32"},
        },
    }
    content = {"data": [datum] * datums, "loss_fn": "cross_entropy"}
    return {"model_id": model_id, "seq_id": seq, "forward_backward_input": content}


def decoders() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("decoder")]


async def test_a_step_that_overtakes_its_large_gradient_on_the_way_waits_for_it(
    http: Http,
) -> None:
    """The bodies are sent at once: the step is decoded while the gradient still is."""
    model_id = await http.new_model()
    before = len(decoders())
    await http.done("forward_backward", {**body(model_id, 1, 10), "forward_only": True})
    assert len(decoders()) == before, "a small one is decoded where it is"
    step = {"model_id": model_id, "seq_id": 3, "adam_params": {"learning_rate": 0.1}}
    gradient, stepped = await asyncio.gather(
        http.done("forward_backward", body(model_id, 2, 2000)), http.done("optim_step", step)
    )
    assert len(decoders()) > before
    assert len(gradient["loss_fn_outputs"]) == 2000
    assert gradient["metrics"]["num_tokens:sum"] == 8000
    assert "skipped_no_gradients" not in stepped["metrics"]


async def test_a_large_body_that_cannot_be_read_is_refused_as_a_small_one_is(http: Http) -> None:
    for text in (b'{"model_id": 3}', b'{"model_id": 3}' + b" " * (300 << 10)):
        status, answer = await http.ask("POST", "forward_backward", text)
        assert status == 400
        assert "malformed json body" in answer["detail"]
