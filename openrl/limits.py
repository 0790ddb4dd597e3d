"""What the door lets in."""

from __future__ import annotations

from dataclasses import dataclass

from openrl.values import Count, Seconds, Whole


@dataclass(frozen=True, slots=True)
class Limits:
    """What the door lets in. `topk_prompt_logprobs` bounds what is asked for at one position of a
    prompt: the best tokens, alternatives drawn, and tokens to be scored. `header_seconds`: within
    which the head of a request must be there; `body_seconds` are granted to its body, and more at
    `body_bytes_per_second`. `open_polls` and `open_bodies_bytes` are each owner's."""

    body_bytes: Count = 256 << 20
    body_bytes_per_second: Count = 4096
    body_seconds: Seconds = 20.0
    header_seconds: Seconds = 20.0
    open_bodies_bytes: Count = 1 << 30
    open_polls: Count = 16384
    request_tokens: Count = 16 << 20
    datums: Count = 4096
    num_samples: Count = 1024
    id_chars: Count = 255
    metadata_bytes: Count = 64 << 10
    topk_prompt_logprobs: Whole = 128
    topk_sample_logprobs: Whole = 128
    tensor_elements: Count = 64 << 20
