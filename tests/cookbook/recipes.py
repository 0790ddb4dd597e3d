"""Which recipes are run, and the sign of each that it works: not only that it ends."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import HERE, NEWER, OLDER, Bench, Missing, Run, expect

ARITHMETIC = (
    "env=arithmetic", "model_name=Qwen/Qwen3-8B", "groups_per_batch=8", "group_size=4",
    "max_tokens=5", "learning_rate=1e-3", "loss_fn=importance_sampling",
)  # fmt: skip
KL = "optim/kl_sample_train_v1"
REWARD = "env/all/reward/total"
EXACT = 1e-6
"""Relative. The server answers in fp32."""


@dataclass(frozen=True)
class Recipe:
    """`sign` in words; `seen` runs it and says what was seen, or raises `Missing`."""

    name: str
    command: str
    sign: str
    seen: Callable[[Bench], str]
    versions: tuple[str, ...] = (OLDER, NEWER)


# --- signs ----------------------------------------------------------------------------------------


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and the last third: single batches are noisy."""
    n = max(1, len(values) // 3)
    return sum(values[:n]) / n, sum(values[-n:]) / n


def falls(run: Run, key: str) -> str:
    first, last = thirds(run.column(key))
    expect(last < first, f"{key} did not fall: {first:.4g} → {last:.4g}")
    return f"{key} {first:.3f} → {last:.3f}"


def rises(run: Run, key: str) -> str:
    first, last = thirds(run.column(key))
    expect(last > first, f"{key} did not rise: {first:.4g} → {last:.4g}")
    return f"{key} {first:.3f} → {last:.3f}"


def near_zero(run: Run, key: str = KL, bound: float = 1e-3) -> str:
    most = max(map(abs, run.column(key)))
    expect(most < bound, f"|{key}| reaches {most:.2g}")
    return f"|{key}| ≤ {most:.1g}"


def steps(run: Run, count: int) -> str:
    """The newer cookbook writes a last row after the last step."""
    expect(len(run.rows) >= count, f"{len(run.rows)} steps, not {count}")
    return f"{count} steps"


def same_steps(undisturbed: Run, resumed: Run, key: str, expected: Sequence[int]) -> str:
    one, other = ({row["step"]: row[key] for row in run.rows} for run in (undisturbed, resumed))
    for step in expected:
        expect(step in other, f"step {step} is missing after the restart")
        if not math.isclose(one[step], other[step], rel_tol=EXACT):
            raise Missing(f"{key} of step {step}: {other[step]} after a restart, not {one[step]}")
    return f"steps {', '.join(map(str, expected))} as undisturbed"


# --- the recipes that need more than one run ------------------------------------------------------


def sl_loop(bench: Bench) -> str:
    arguments = ("batch_size=8", "max_length=512", "max_steps=6", "save_every=2")
    whole = bench.recipe("sl_loop", "sl_loop", *arguments)
    resumed = killed_and_resumed(bench, whole, "sl_loop", arguments, at=4)
    compared = same_steps(whole, resumed, "train_mean_nll", (2, 3, 4, 5))
    return f"{falls(whole, 'train_mean_nll')}; {compared}"


def rolling(bench: Bench) -> str:
    """This loop of the cookbook saves after a step that it repeats when it is run again, on any
    server: so it is not compared with an undisturbed run."""
    arguments = (
        "dataset=no_robots", "batch_size=8", "lora_rank=8", "max_steps=12", "eval_every=4",
        "save_every=4", "rolling_save_every=2", "learning_rate=1e-3",
    )  # fmt: skip
    whole = bench.recipe("rolling", "chat_sl.train", *arguments)
    expect(any(each.get("rolling") for each in whole.checkpoints), "no rolling save")
    arguments = (*arguments, "behavior_if_log_dir_exists=resume")
    resumed = killed_and_resumed(bench, whole, "chat_sl.train", arguments, at=7)
    done = {row["step"] for row in resumed.rows}
    expect(done >= set(range(4, 12)), f"only steps {sorted(done)} after the restart")
    last, before = resumed.column("train_mean_nll")[-1], whole.column("train_mean_nll")[4]
    expect(last < before, f"NLL {last} after the restart, and {before} before")
    return f"{falls(whole, 'train_mean_nll')}; killed at step 7, it ends at {last:.3f}"


def killed_and_resumed(
    bench: Bench, whole: Run, module: str, arguments: tuple[str, ...], at: int
) -> Run:
    """Each new model draws its adapter anew, so the run that is killed begins from the first
    checkpoint of the undisturbed one. Rolling saves make room for those after them."""
    name = f"{whole.directory.name}-resumed"
    for _ in range(3):  # a step takes a tenth of a second, and the kill may come too late
        shutil.rmtree(bench.runs / name, ignore_errors=True)
        (bench.runs / name).mkdir()
        first = next(each for each in whole.checkpoints if not each.get("rolling"))
        (bench.runs / name / "checkpoints.jsonl").write_text(json.dumps(first) + "\n")
        try:
            bench.killed(name, module, *arguments, when=lambda run: reached(run, at))
        except Missing:
            continue
        return bench.recipe(name, module, *arguments)
    raise Missing("it ended before it could be killed, three times")


def reached(run: Run, step: int) -> bool:
    try:
        return any(row["step"] >= step for row in run.rows)
    except ValueError:  # a line that is being written
        return False


def rlhf(bench: Bench) -> str:
    """Three stages, each from the checkpoints of those before."""
    bench.python(
        "rlhf", "-m", "tinker_cookbook.recipes.preference.rlhf.rlhf_pipeline",
        "short_name=tiny", "batch_size=8", "lora_rank=8", "max_steps=6", "rl_max_tokens=8",
        "rl_group_size=2", "eval_every=0", "save_every=4", "max_length=512",
        "sft_learning_rate=1e-3", "rm_learning_rate=1e-3",
    )  # fmt: skip
    sft, rm, rl = (Run(bench.runs / "rlhf-tiny" / stage, "") for stage in ("sft", "rm", "rl"))
    return "; ".join(
        [falls(sft, "train_mean_nll"), falls(rm, "train_mean_nll"), near_zero(rl), steps(rl, 6)]
    )


def refused_default_loss(bench: Bench) -> str:
    """The newer cookbook's default loss has no public formula."""
    try:
        bench.recipe("default loss", "math_rl.train", *ARITHMETIC[:-1], "max_steps=2")
    except Missing:
        said = (bench.runs / "default loss.log").read_text()
        expect("stable_reinforce" in said, "it failed for another reason")
        expect("importance_sampling" in said, "the message names no loss that works")
        return "refused; the message names the losses that work"
    raise Missing("it was not refused")


# --- the table ------------------------------------------------------------------------------------


def recipe(
    name: str, module: str, arguments: Sequence[str], sign: str, *checks: Callable[[Run], str],
    newer: Sequence[str] = (), versions: tuple[str, ...] = (OLDER, NEWER),
) -> Recipe:  # fmt: skip
    """One run and what is looked at in it; `newer` is added for the newer cookbook."""

    def seen(bench: Bench) -> str:
        more = newer if bench.version == NEWER else ()
        run = bench.recipe(name, module, *arguments, *more)
        return "; ".join(check(run) for check in checks)

    return Recipe(name, " ".join((module, *arguments)), sign, seen, versions)


def script(name: str, file: str, sign: str, check: Callable[[Run], str]) -> Recipe:
    """For loops and evaluations of the cookbook that no recipe of its own starts."""

    def seen(bench: Bench) -> str:
        return check(bench.python(name, str(HERE / file), str(bench.runs / name)))

    return Recipe(name, file, sign, seen)


def tutorial(name: str) -> Recipe:
    def seen(bench: Bench) -> str:
        bench.python(name, str(bench.cache.tutorials / f"{name}.py"))
        return "every cell runs"

    return Recipe(name, f"tutorials/{name}.py", "every cell runs", seen, (NEWER,))


def dpo_loss(run: Run) -> str:
    first = run.column("dpo_loss")[0]
    expect(abs(first - math.log(2)) < 1e-3, f"the first loss is {first}, not ln 2")
    return f"first {first:.4f}; {falls(run, 'dpo_loss')}"


def scored(run: Run) -> str:
    expect("scored 16 examples" in run.said, "not all examples were scored")
    return "16 examples scored"


GAME = ("batch_size=4", "max_tokens=8", "max_steps=3", "renderer_name=qwen3_5_disable_thinking")
DISTIL = ("group_size=2", "max_tokens=16", "max_steps=4", "lora_rank=8")

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        "sl_loop",
        "sl_loop batch_size=8 max_length=512 max_steps=6 save_every=2",
        "NLL falls; killed at step 4 and run again, it goes on as undisturbed",
        sl_loop,
    ),
    recipe(
        "rl_loop", "rl_loop", ("batch_size=4", "group_size=4", "max_tokens=16", "max_steps=3"),
        "ends", lambda run: steps(run, 3), newer=("loss_fn=importance_sampling",),
    ),
    recipe(
        "arithmetic", "math_rl.train", (*ARITHMETIC, "max_steps=20"),
        "sampler and trainer agree; reward rises", near_zero, lambda run: rises(run, REWARD),
    ),
    recipe(
        "dpo", "preference.dpo.train", ("batch_size=8", "max_steps=10", "learning_rate=1e-3"),
        "first loss ln 2, then it falls", dpo_loss,
    ),
    recipe(
        "shorter", "preference.shorter.train",
        ("batch_size=4", "group_size=4", "max_tokens=32", "max_steps=20", "eval_every=0",
         "learning_rate=1e-3"),
        "answers get shorter", near_zero, lambda run: falls(run, "env/all/ac_tokens_per_turn"),
    ),
    recipe(
        "async", "math_rl.train", (*ARITHMETIC, "max_steps=12", "max_steps_off_policy=2"),
        "ends off policy; reward rises", lambda run: rises(run, REWARD),
    ),
    recipe(
        "streaming", "math_rl.train",
        (*ARITHMETIC, "max_steps=12", "stream_minibatch_config.num_minibatches=2",
         "stream_minibatch_config.groups_per_batch=8"),
        "sampler and trainer agree; reward rises", near_zero, lambda run: rises(run, REWARD),
    ),
    recipe(
        "several optimizer steps", "math_rl.train",
        (*ARITHMETIC, "max_steps=4", "num_substeps=2", "compute_post_kl=true"),
        "ends", lambda run: steps(run, 4),
    ),
    *(
        recipe(
            f"loss {loss}", "math_rl.train",
            (*ARITHMETIC[:-1], f"loss_fn={loss}", "max_steps=4"),
            "ends; sampler and trainer agree", near_zero, lambda run: steps(run, 4),
        )
        for loss in ("ppo", "cispo", "dro")
    ),
    recipe(
        "twenty_questions", "multiplayer_rl.twenty_questions.train",
        (*GAME, "group_size=2", "eval_every=0"), "sampler and trainer agree over 20 turns",
        near_zero, lambda run: steps(run, 3),
    ),
    recipe(
        "guess_number", "multiplayer_rl.guess_number.train",
        (*GAME, "group_size=2", "eval_every=0"), "sampler and trainer agree over 10 turns",
        near_zero, lambda run: steps(run, 3),
    ),
    recipe(
        "tic-tac-toe", "multiplayer_rl.text_arena.train",
        (*GAME, "num_train_datapoints=12", "num_test_datapoints=2", "eval_every=2"),
        "two players that wait for each other; ends", near_zero, lambda run: steps(run, 3),
    ),
    recipe(
        "on-policy distillation", "distillation.on_policy_distillation",
        (*DISTIL, "groups_per_batch=4"), "ends; sampler and trainer agree", near_zero,
        lambda run: steps(run, 4),
    ),
    recipe(
        "several teachers", "distillation.on_policy_multi_teacher",
        (*DISTIL, "deepmath_groups_per_batch=2", "tulu3_groups_per_batch=2"),
        "ends; sampler and trainer agree", near_zero, lambda run: steps(run, 4),
    ),
    recipe(
        "off-policy distillation", "distillation.off_policy_reasoning",
        ("batch_size=8", "max_steps=6", "lora_rank=8", "buffer_size=64"), "NLL falls",
        lambda run: falls(run, "train_mean_nll"),
    ),
    recipe(
        "self-distillation, top 20", "sdft.train",
        ("groups_per_batch=4", "max_tokens=16", "max_steps=4", "lora_rank=8", "topk=20",
         "eval_every=0"),
        "[N, 20] soft targets from top-k prompt logprobs", lambda run: steps(run, 4),
    ),
    recipe(
        "self-distillation, reverse KL", "sdft.train",
        ("groups_per_batch=4", "max_tokens=16", "max_steps=4", "lora_rank=8", "reverse=true",
         "eval_every=0"),
        "ends", lambda run: steps(run, 4),
    ),
    script(
        "soft targets", "soft_targets.py", "loss against a teacher's top 20 falls",
        lambda run: falls(run, "train/loss:sum"),
    ),
    Recipe(
        "rlhf", "preference.rlhf.rlhf_pipeline max_steps=6",
        "NLL falls in the first two stages; the third's sampler and trainer agree", rlhf,
    ),
    Recipe(
        "rolling saves", "chat_sl.train rolling_save_every=2 save_every=4",
        "killed and run again, it goes on from its last rolling save", rolling,
    ),
    recipe(
        "prompt distillation", "prompt_distillation.train",
        ("file_path=convs.jsonl", "batch_size=8", "max_steps=6", "lora_rank=8", "eval_every=0",
         "learning_rate=1e-3"),
        "NLL falls", lambda run: falls(run, "train_mean_nll"),
    ),
    script("evaluation", "evaluate.py", "GSM8K's benchmark scores every example", scored),
    Recipe(
        "default loss", "math_rl.train with the loss that 0.6.1 takes by itself",
        "refused, with the losses that work", refused_default_loss, (NEWER,),
    ),
    *map(
        tutorial,
        ("101_hello_tinker", "102_first_sft", "103_async_patterns", "104_first_rl",
         "202_loss_functions", "203_completers", "204_evaluations", "302_custom_environment",
         "403_dpo_preferences", "404_sequence_extension", "405_multi_agent"),
    ),
)  # fmt: skip
