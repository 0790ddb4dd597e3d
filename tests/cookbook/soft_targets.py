"""Off-policy distillation with a teacher's best twenty tokens as targets: a loop of the cookbook
that none of its recipes starts. `python soft_targets.py DIRECTORY`."""

import asyncio
import sys

from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.recipes.chat_sl.chat_datasets import NoRobotsBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

MODEL = "Qwen/Qwen3-8B"


def main(directory: str) -> None:
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=MODEL, renderer_name="qwen3", max_length=512, batch_size=8
    )
    config = train_off_policy.Config(
        learning_rate=1e-3,
        dataset_configs=[
            train_off_policy.DatasetWithTeacher(
                dataset_builder=NoRobotsBuilder(common_config=common),
                teacher_config=TeacherConfig(base_model=MODEL),
            )
        ],
        model_name=MODEL,
        recipe_name="soft_targets",
        lora_rank=8,
        batch_size=8,
        max_steps=8,
        eval_every=0,
        log_path=directory,
    )
    asyncio.run(train_off_policy.main(config))


if __name__ == "__main__":
    main(sys.argv[1])
