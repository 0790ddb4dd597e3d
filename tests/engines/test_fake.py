"""The fake engine is honest: torch agrees with its numbers, and it keeps the engines' protocol."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrl.engines.base import (
    AdapterSource,
    AtomPiece,
    BaseModelInfo,
    ControlPass,
    CreateAdapter,
    DecodePass,
    DecodeReport,
    DropAdapter,
    DropVersion,
    LoadAdapter,
    OptimPass,
    OptimPiece,
    OptimReport,
    PinVersion,
    RowId,
    RowStart,
    SaveAdapter,
    TrainPass,
    TrainReport,
)
from openrl.engines.fake import FakeEngine
from openrl.engines.fake_model import FakeAdapter
from openrl.engines.losses import LOSSES
from openrl.errors import Diverged, Gone, InvalidDatum, NotFound
from openrl.types import (
    AdamParams,
    Datum,
    Failed,
    ForwardBackwardOutput,
    LoraConfig,
    ModelId,
    OptimStepDone,
    RequestId,
    Sample,
    SampledSequence,
    SamplingParams,
    Stop,
    VersionId,
)

VOCAB = 40
M = ModelId("m")
R = RequestId("r")


class Driver:
    def __init__(self, **settings: Any) -> None:
        self.engine = FakeEngine(["tiny"], vocab_size=VOCAB, **settings)
        self.info: BaseModelInfo = self.engine.describe()[0]
        self.engine.load(lambda _: None)

    def control(self, control: Any) -> Any:
        executed = self.engine.execute(ControlPass(self.info.weights, R, control))
        return executed.report.error  # type: ignore[union-attr]

    def create(self, model: ModelId = M, rank: int = 8) -> None:
        assert self.control(CreateAdapter(model, LoraConfig(rank=rank, seed=0))) is None

    def train(self, piece: AtomPiece) -> ForwardBackwardOutput | Failed:
        report = self.engine.execute(TrainPass(self.info.weights, (piece,))).report
        assert isinstance(report, TrainReport)
        return report.outcomes[0]

    def trained(self, piece: AtomPiece) -> ForwardBackwardOutput:
        outcome = self.train(piece)
        assert isinstance(outcome, ForwardBackwardOutput)
        return outcome

    def step(self, adam: AdamParams) -> OptimStepDone:
        pieces = (OptimPiece(R, M, adam),)
        report = self.engine.execute(OptimPass(self.info.weights, pieces)).report
        assert isinstance(report, OptimReport)
        assert isinstance(report.outcomes[0], OptimStepDone)
        return report.outcomes[0]

    def decode(self, **changes: Any) -> DecodeReport:
        report = self.engine.execute(DecodePass(self.info.weights, **changes)).report
        assert isinstance(report, DecodeReport)
        return report

    def sampled(self, start: RowStart) -> list[SampledSequence]:
        report = self.decode(admit=(start,), steps=start.max_new_tokens)
        ended = [row.ended for row in report.rows]
        assert all(isinstance(e, SampledSequence) for e in ended)
        return ended  # type: ignore[return-value]


def piece(data: list[Datum], loss: str = "cross_entropy", **changes: Any) -> AtomPiece:
    fields = {"start": 0, "loss_fn_config": {}, "forward_only": False, "last": True} | changes
    return AtomPiece(
        request_id=R,
        model_id=M,
        data=tuple(data),
        loss_fn=loss,
        **fields,  # type: ignore[arg-type]
    )


def row_start(
    prompt: list[int], indexes: tuple[int, ...] = (0,), new: int = 6, **changes: Any
) -> RowStart:
    settings = {"seed": 7, "stop": Stop(eos=False)} | changes
    adapter, topk = settings.pop("adapter", None), settings.pop("topk", 0)
    params = SamplingParams(new, **settings)  # type: ignore[arg-type]
    sample = Sample(np.array(prompt, np.int32), params, len(indexes), bool(topk), topk)
    return RowStart(R, sample, adapter, indexes, new)


def random_datum(rng: np.random.Generator, n: int, k: int | None = None) -> Datum:
    shape = (n,) if k is None else (n, k)
    targets = rng.integers(0, VOCAB, shape)
    inputs = {
        "target_tokens": targets,
        "weights": rng.normal(size=shape).astype(np.float32),
        "logprobs": -3 - rng.random(n, dtype=np.float32),
        "advantages": rng.normal(size=n).astype(np.float32),
        "sequence_ratio_mask": (rng.random(n) < 0.5).astype(np.float32),
    }
    return Datum(rng.integers(0, VOCAB, n).astype(np.int32), inputs)


# --- against torch -------------------------------------------------------------------------


def torch_logprobs(datum: Datum, bias: torch.Tensor) -> torch.Tensor:
    previous = torch.from_numpy(datum.tokens.astype(np.float64))[:, None]
    wave = torch.sin(0.618 * (previous + 1) * torch.arange(1, VOCAB + 1))
    rows = torch.log_softmax(wave + bias, -1)
    targets = torch.from_numpy(datum.loss_inputs["target_tokens"])
    return rows.gather(1, targets.reshape(len(datum.tokens), -1)).reshape(targets.shape)


def torch_loss(name: str, lp: torch.Tensor, datum: Datum) -> torch.Tensor:
    """The formulas of the protocol, written out."""
    given = {k: torch.from_numpy(v).double() for k, v in datum.loss_inputs.items()}
    if name == "cross_entropy":
        return -(given["weights"] * lp).sum()
    q, a = given["logprobs"], given["advantages"]
    r = torch.exp(lp - q)
    match name:
        case "importance_sampling":
            return -(r * a).sum()
        case "ppo":
            return -torch.minimum(r * a, r.clamp(0.8, 1.2) * a).sum()
        case "cispo":
            return -(r.clamp(0.0, 4.0).detach() * lp * a).sum()
        case "dro":
            return -(lp * a - 0.05 / 2 * (lp - q) ** 2).sum()
        case _:
            mask = given["sequence_ratio_mask"] != 0
            mean = (lp.detach() - q)[mask].mean() if mask.any() else torch.tensor(0.0)
            s = torch.exp(mean + lp - lp.detach())
            return -torch.minimum(s * a, s.clamp(0.9997, 1.0004) * a).sum()


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_gradients_and_adam_are_torchs(loss: str) -> None:
    rng = np.random.default_rng(0)
    k = 3 if loss == "cross_entropy" else None
    data = [random_datum(rng, n, k) for n in (5, 1, 9)]
    bias = torch.zeros(VOCAB, dtype=torch.float64, requires_grad=True)
    adam = AdamParams(0.05, 0.9, 0.95, 1e-8, 0.1, grad_clip_norm=0.5)
    optimizer = torch.optim.AdamW([bias], lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    driver = Driver()
    driver.create()
    for version in (1, 2, 3):
        output = driver.trained(piece(data, loss))
        logprobs = [torch_logprobs(d, bias) for d in data]
        total = sum(torch_loss(loss, lp, d) for lp, d in zip(logprobs, data, strict=True))
        assert output.metrics["loss:sum"] == pytest.approx(total.item())  # type: ignore[union-attr]
        for got, lp in zip(output.outputs, logprobs, strict=True):
            np.testing.assert_allclose(got["logprobs"], lp.detach(), rtol=1e-6)
        total.backward()  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_([bias], 0.5)
        optimizer.step()
        optimizer.zero_grad()
        done = driver.step(adam)
        assert done.version == version
        assert done.metrics["grad_norm"] == pytest.approx(norm.item())


def test_thresholds_may_come_token_by_token() -> None:
    rng = np.random.default_rng(1)
    one = random_datum(rng, 6)
    low, high = np.full(6, 0.3, np.float32), np.full(6, 1.9, np.float32)
    inputs = dict(one.loss_inputs, clip_low_threshold=low, clip_high_threshold=high)
    driver = Driver()
    driver.create()
    config = {"clip_low_threshold": float(low[0]), "clip_high_threshold": float(high[0])}
    by_token = driver.trained(piece([Datum(one.tokens, inputs)], "ppo"))
    by_config = driver.trained(piece([one], "ppo", loss_fn_config=config))
    by_default = driver.trained(piece([one], "ppo"))
    assert by_token.metrics == by_config.metrics != by_default.metrics


# --- atoms ---------------------------------------------------------------------------------


def test_gradients_count_with_the_last_atom() -> None:
    rng = np.random.default_rng(2)
    data = [random_datum(rng, 4) for _ in range(2)]
    whole, cut = Driver(), Driver()
    for driver in (whole, cut):
        driver.create()
    whole.trained(piece(data))
    cut.trained(piece(data[:1], last=False))
    assert cut.step(AdamParams()).metrics == {"skipped_no_gradients": 1.0}
    cut.trained(piece(data[1:], start=1))
    norms = [
        driver.step(AdamParams(grad_clip_norm=0)).metrics["grad_norm"] for driver in (whole, cut)
    ]
    assert norms[0] == pytest.approx(norms[1])


def test_a_failed_atom_drops_its_scratch_and_names_its_datum() -> None:
    rng = np.random.default_rng(3)
    good, bad = random_datum(rng, 4), random_datum(rng, 4)
    over = dict(bad.loss_inputs, logprobs=np.full(4, -1000, np.float32))
    driver = Driver()
    driver.create()
    driver.trained(piece([good], "ppo", last=False))
    failed = driver.train(piece([good, Datum(bad.tokens, over)], "importance_sampling", start=1))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InvalidDatum)
    assert failed.error.index == 2
    assert driver.step(AdamParams()).metrics == {"skipped_no_gradients": 1.0}
    driver.trained(piece([good], forward_only=True))
    assert driver.step(AdamParams()).metrics == {"skipped_no_gradients": 1.0}
    driver.trained(piece([bad]))
    alone = driver.step(AdamParams()).metrics["grad_norm"]
    fresh = Driver()
    fresh.create()
    fresh.trained(piece([bad]))
    assert alone == fresh.step(AdamParams()).metrics["grad_norm"]


def test_what_float32_cannot_hold_fails_its_datum_and_leaves_no_gradient() -> None:
    datum = random_datum(np.random.default_rng(3), 4)
    huge = dict(datum.loss_inputs, weights=np.full(4, 3e38, np.float32))
    driver = Driver()
    driver.create()
    failed = driver.train(piece([Datum(datum.tokens, huge)]))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InvalidDatum)
    assert driver.step(AdamParams()).metrics == {"skipped_no_gradients": 1.0}


def test_a_model_that_is_not_there() -> None:
    driver = Driver()
    failed = driver.train(piece([random_datum(np.random.default_rng(0), 2)]))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, NotFound)
    assert isinstance(driver.control(PinVersion(M, VersionId("v"))), NotFound)
    driver.create()
    assert driver.control(DropAdapter(M)) is None
    assert isinstance(driver.control(SaveAdapter(M, Path("/"), False)), NotFound)


# --- checkpoints and versions --------------------------------------------------------------


def move(driver: Driver, seed: int) -> None:
    driver.trained(piece([random_datum(np.random.default_rng(seed), 8)]))
    driver.step(AdamParams(learning_rate=0.2))


def scores(driver: Driver) -> np.ndarray:
    one = random_datum(np.random.default_rng(9), 8)
    output = driver.trained(piece([one], forward_only=True))
    return np.asarray(output.outputs[0]["logprobs"])


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_checkpoint_holds_the_weights_and_perhaps_the_moments(
    tmp_path: Path, with_optimizer: bool
) -> None:
    driver = Driver()
    driver.create()
    move(driver, 0)
    saved = scores(driver)
    assert driver.control(SaveAdapter(M, tmp_path, with_optimizer=True)) is None
    move(driver, 1)
    onward = scores(driver)
    other = Driver()
    lora = LoraConfig(rank=8)
    assert other.control(CreateAdapter(M, lora, tmp_path, with_optimizer)) is None
    np.testing.assert_array_equal(scores(other), saved)
    move(other, 1)
    assert np.array_equal(scores(other), onward) == with_optimizer


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    small = Driver()
    small.create(rank=4)
    small.control(SaveAdapter(M, tmp_path, with_optimizer=False))
    driver = Driver()
    driver.create(rank=8)
    move(driver, 0)
    before = scores(driver)
    assert "rank is 4" in driver.control(LoadAdapter(M, tmp_path, False)).message
    assert driver.control(LoadAdapter(M, tmp_path / "none", False)) is not None
    np.testing.assert_array_equal(scores(driver), before)


def test_a_pinned_version_stays_as_it_was(tmp_path: Path) -> None:
    driver = Driver()
    driver.create()
    move(driver, 0)
    version = VersionId("v")
    driver.control(PinVersion(M, version))
    driver.control(SaveAdapter(M, tmp_path, with_optimizer=False))
    start = row_start([1, 2], adapter=AdapterSource(version))
    before = driver.sampled(start)
    move(driver, 1)
    np.testing.assert_array_equal(driver.sampled(start)[0].logprobs, before[0].logprobs)
    plain = driver.sampled(row_start([1, 2]))
    assert not np.array_equal(plain[0].logprobs, before[0].logprobs)
    read = row_start([1, 2], adapter=AdapterSource(VersionId("w"), tmp_path))
    np.testing.assert_array_equal(driver.sampled(read)[0].logprobs, before[0].logprobs)
    driver.control(DropVersion(version))
    (report,) = driver.decode(admit=(start,)).rows
    assert isinstance(report.ended, Failed)
    assert isinstance(report.ended.error, Gone)


# --- sampling ------------------------------------------------------------------------------


def test_rows_are_alike_in_company_alone_and_after_preemption() -> None:
    start = row_start([1, 2, 3], (0, 1), new=12)
    alone = [s.tokens.tolist() for s in Driver().sampled(start)]
    assert alone[0] != alone[1]
    driver = Driver()
    other = RowStart(RequestId("other"), start.sample, None, (0, 1, 2), 12)
    driver.decode(admit=(start, other), steps=5)
    away = RowId(R, 1)
    during = driver.decode(preempt=(away,), drop=(RowId(other.request_id, 2),), steps=2)
    assert {row.row for row in during.rows} == {RowId(R, 0), *(RowId("other", i) for i in (0, 1))}
    ended = {row.row: row.ended for row in driver.decode(resume=(away,), steps=12).rows}
    for index in (0, 1):
        sequence = ended[RowId(R, index)]
        assert isinstance(sequence, SampledSequence)
        assert sequence.tokens.tolist() == alone[index]
    assert driver.decode(drop=(away,), steps=1).rows == ()  # unknown rows may be dropped


def test_truncation_and_temperature() -> None:
    def draws(**params: Any) -> set[int]:
        tokens: set[int] = set()
        for seed in range(40):
            tokens.update(Driver().sampled(row_start([5], new=1, seed=seed, **params))[0].tokens)
        return tokens

    wave = np.sin(0.618 * 6 * np.arange(1, VOCAB + 1))
    order = np.argsort(-wave)
    assert draws(temperature=0.0) == draws(temperature=5e-324) == {order[0]}
    assert draws(top_k=3) == set(order[:3])
    mass = np.cumsum(np.sort(np.exp(wave) / np.exp(wave).sum())[::-1])
    kept = int(np.searchsorted(mass, 0.2)) + 1
    assert draws(top_p=0.2) <= set(order[:kept])
    assert len(draws()) > 15


def test_reported_logprobs_are_tempered_and_untruncated() -> None:
    start = row_start([5], new=1, temperature=0.5, top_k=2)
    (sequence,) = Driver().sampled(start)
    wave = np.sin(0.618 * 6 * np.arange(1, VOCAB + 1)) / 0.5
    expected = wave - np.log(np.exp(wave).sum())
    np.testing.assert_allclose(sequence.logprobs, expected[sequence.tokens], rtol=1e-6)


@pytest.mark.parametrize(
    ("stop_at", "matches"),
    [
        (lambda t: Stop(eos=False, tokens=(t[3],)), lambda t: t.index(t[3]) + 1),
        (lambda t: Stop(eos=False, strings=(chr(t[2]) + chr(t[3]),)), lambda t: 4),
    ],
)
def test_stops_end_a_sequence_with_the_token_that_completed_them(
    stop_at: Callable[[list[int]], Stop], matches: Callable[[list[int]], int]
) -> None:
    free = Driver().sampled(row_start([1], new=8))[0].tokens.tolist()
    (stopped,) = Driver().sampled(row_start([1], new=8, stop=stop_at(free)))
    assert stopped.stop_reason == "stop"
    assert stopped.tokens.tolist() == free[: matches(free)]


def test_the_end_of_sequence_stops_unless_switched_off() -> None:
    eos = VOCAB - 1
    for seed in range(200):
        (free,) = Driver().sampled(row_start([1], new=30, seed=seed))
        if eos in free.tokens[:-1]:
            break
    assert free.stop_reason == "length"
    (stopped,) = Driver().sampled(row_start([1], new=30, seed=seed, stop=Stop()))
    assert stopped.stop_reason == "stop"
    assert stopped.tokens[-1] == eos
    assert eos not in stopped.tokens[:-1]


def test_prompt_logprobs() -> None:
    start = row_start([3, 1, 2], topk=4, temperature=0.3)
    output = Driver().decode(admit=(start,)).prompts[R]
    assert output.prompt_logprobs is not None
    assert output.topk_prompt_logprobs is not None
    assert np.isnan(output.prompt_logprobs[0])
    datum = Datum(np.array([3, 1], np.int32), {"target_tokens": np.array([1, 2])})
    expected = torch_logprobs(datum, torch.zeros(VOCAB))
    np.testing.assert_allclose(output.prompt_logprobs[1:], expected, rtol=1e-5)
    top = output.topk_prompt_logprobs
    assert top.token_ids.shape == top.logprobs.shape == (3, 4)
    assert (top.token_ids[0] == 0).all()
    assert (top.logprobs[0] == -99999.0).all()
    assert (np.diff(top.logprobs[1:]) <= 0).all()
    later = RowStart(R, start.sample, None, (1,), 6)
    assert Driver().decode(admit=(later,)).prompts == {}


def test_capacity_and_cost_follow_what_is_held_and_done() -> None:
    slept: list[float] = []
    driver = Driver(kv_blocks=10, block_tokens=4, token_seconds=0.5, sleep=slept.append)
    slept.clear()
    start = row_start([1, 2, 3], (0, 1), new=6)
    work = DecodePass(driver.info.weights, admit=(start,), steps=2)
    executed = driver.engine.execute(work)
    assert executed.capacity.kv_blocks_free == 10 - 2 * 2  # 5 tokens are two blocks of 4
    assert executed.seconds == slept[-1] == 0.5 * (3 + 2 * 2)
    assert [row.kv_blocks for row in executed.report.rows] == [2, 2]  # type: ignore[union-attr]
    free = driver.engine.execute(DecodePass(driver.info.weights, preempt=(RowId(R, 0),)))
    assert free.capacity.kv_blocks_free == 8


def test_a_gradient_that_is_not_finite_is_dropped() -> None:
    """As torch's engine does it; weights and counts stay."""
    adapter = FakeAdapter.fresh(4, 8)
    adapter.grad_V = np.array([np.inf, *[0.0] * 7])
    with pytest.raises(Diverged):
        adapter.step(AdamParams())
    assert adapter.grad_V is None
    assert (adapter.steps, adapter.version) == (0, 0)
    assert not adapter.bias_V.any()
