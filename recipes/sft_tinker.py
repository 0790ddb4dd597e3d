"""Supervised fine-tuning through the `tinker` SDK. With `openrl serve` running:

export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local
python -m recipes.sft_tinker
"""

from itertools import islice

import numpy as np
import tinker
from transformers import AutoTokenizer

from openrl import demo
from recipes.tasks.sql import Question, questions

service = tinker.ServiceClient()
model = service.create_lora_training_client(demo.NAME, rank=16).result()
tokenizer = AutoTokenizer.from_pretrained(demo.model_directory())


def datum(question: Question) -> tinker.Datum:
    """The loss counts the answer's tokens only: the prompt's have weight zero."""
    prompt = tokenizer.apply_chat_template(
        question.messages, tokenize=False, add_generation_prompt=True
    )
    given = tokenizer.encode(prompt)
    answer = tokenizer.encode(question.sql + tokenizer.eos_token)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints((given + answer)[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array((given + answer)[1:]),
            "weights": np.array([0.0] * (len(given) - 1) + [1.0] * len(answer), np.float32),
        },
    )


asked = questions("sft")
for step in range(20):
    data = [datum(question) for question in islice(asked, 16)]
    gradient = model.forward_backward(data, "cross_entropy")
    update = model.optim_step(tinker.AdamParams(learning_rate=1e-3))
    update.result()
    loss = gradient.result().metrics["loss:sum"]
    tokens = sum(each.loss_fn_inputs["weights"].to_numpy().sum() for each in data)
    print(f"step {step + 1}: loss {loss / tokens:.3f} a token")

print("saved", model.save_state("sft").result().path)
