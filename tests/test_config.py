"""Configuration: who wins, what is refused, and what the refusal says."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from openrl import config, demo, threads
from openrl.commands.serving import toml_lines
from openrl.config import Config, EngineConfig, Limits, ModelSource, SchedulerConfig
from openrl.errors import UserError
from openrl.settings import MODELS, Setting
from openrl.values import OwnerQuota


def flag(key: str, value: object) -> Setting:
    return Setting(key, value, f"--{key.rpartition('.')[2]}", text=True)


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "openrl.toml"
        path.write_text(text)
        return path

    return write


def test_nothing_set_gives_the_defaults() -> None:
    assert config.load(env={}) == Config(models=())


def test_flags_win_over_environment_over_file_over_openmp(toml) -> None:
    file = toml("[engine]\nthreads = 3\nmax_rows = 33\n[server]\nport = 3333")
    env = {
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "ACTIVE",
        "OPENRL_ENGINE__MAX_ROWS": "44",
        "OPENRL_SERVER__PORT": "4444",
    }
    loaded = config.load([flag("server.port", "5555")], env, file)
    assert loaded.port == 5555
    assert loaded.engine == EngineConfig(threads=3, max_rows=44, wait_policy="active")


def test_every_section_of_a_file_is_read(toml) -> None:
    file = toml(
        """
        [server]
        host = "0.0.0.0"
        poll_seconds = 5
        [models]
        "a/with.dot" = "weights/a"
        "b" = { path = "/abs/b" }
        "c" = {}
        [engine]
        kind = "fake"
        device = "cuda:1"
        [scheduler]
        quantum_seconds = 0.5
        owner_weights = { alice = 2, bob = 0.5 }
        [limits]
        topk_prompt_logprobs = 0
        """
    )
    loaded = config.load(env={}, file=file)
    assert loaded == Config(
        models=(
            ModelSource("a/with.dot", file.parent / "weights/a"),  # relative to the file
            ModelSource("b", Path("/abs/b")),
            ModelSource("c"),
        ),
        host="0.0.0.0",
        poll_seconds=5.0,
        engine=EngineConfig(kind="fake", device="cuda:1"),
        scheduler=SchedulerConfig(quantum_seconds=0.5, owner_weights={"alice": 2.0, "bob": 0.5}),
        limits=Limits(topk_prompt_logprobs=0),
    )


def test_the_environment_names_the_file_and_a_flag_another(toml, tmp_path: Path) -> None:
    env = {"OPENRL_CONFIG": str(toml("[server]\nport = 1"))}
    other = tmp_path / "other.toml"
    other.write_text("[server]\nport = 2")
    assert config.load(env=env).port == 1
    assert config.load(env=env, file=other).port == 2


def test_models_of_the_strongest_source_replace_the_others(toml) -> None:
    file = toml('[models]\na = "x"')
    env = {"OPENRL_MODELS": "b=/b, c"}
    assert config.load(env=env, file=file).models == (
        ModelSource("b", Path("/b")),
        ModelSource("c"),
    )
    typed = Setting(MODELS, ("d=e=f",), "--model", text=True)
    assert config.load([typed], env, file).models == (ModelSource("d", Path("e=f")),)


def test_the_demo_model_is_known_by_its_name() -> None:
    models = config.load(env={"OPENRL_MODELS": f"{demo.NAME},b"}).models
    assert models == (ModelSource(demo.NAME, demo.model_directory()), ModelSource("b"))


def test_a_mapping_can_be_said_in_the_environment() -> None:
    env = {"OPENRL_SCHEDULER__OWNER_WEIGHTS": "alice=2,bob=0.5"}
    assert config.load(env=env).scheduler.owner_weights == {"alice": 2.0, "bob": 0.5}


def test_the_home_directory_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert config.load([flag("server.data", "~/x")], {}).data == Path("/home/me/x")


def test_what_kubernetes_injects_for_a_service_is_left_alone() -> None:
    env = {
        "OPENRL_PORT": "tcp://10.0.0.1:8000",
        "OPENRL_SERVICE_HOST": "10.0.0.1",
        "OPENRL_PORT_8000_TCP_PORT": "8000",
    }
    assert config.load(env=env) == Config(models=())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[engin]\nthreads = 1", ["openrl.toml", "[engin]", "[engine]", "[models]"]),
        ("port = 1", ["openrl.toml", "port"]),
        ("engine = 3", ["openrl.toml", "engine", "table"]),
        ("[engine]\nthred = 1", ["openrl.toml [engine]", "thred", "mean engine.threads", "dtype"]),
        ("[engine]\nthreads = 0", ["openrl.toml [engine]", "threads = 0", "at least 1"]),
        ("[engine]\nthreads = true", ["threads = True", "whole number"]),
        ('[engine]\nthreads = "2"', ["threads = '2'", "whole number"]),
        ("[engine]\nmax_rows = 1.5", ["max_rows = 1.5", "whole number"]),
        ('[engine]\nkind = "tensorflow"', ["kind = 'tensorflow'", "torch, fake"]),
        ('[engine]\ndevice = "gpu"', ["device = 'gpu'", "cuda:N"]),
        ("[server]\nport = 65536", ["server.port = 65536", "65535"]),
        ("[server]\nhost = 1", ["server.host = 1", "text"]),
        ("[server]\ndata = 1", ["server.data = 1", "path"]),
        ('[server]\nhome = "A/.."', ["server.home", "lowercase"]),
        ("[server]\npoll_seconds = nan", ["poll_seconds", "finite"]),
        ("[server]\npoll_seconds = inf", ["poll_seconds", "finite"]),
        ("[server]\nmodels = 1", ["server.models"]),
        ("[scheduler]\nowner_weights = { a = 0 }", ["owner_weights", "above 0"]),
        ("[scheduler.owners.a]\nmax_model = 1", ["scheduler.owners", "'a'", "table", "max_models"]),
        ("[scheduler.owners.a]\nweight = 0", ["scheduler.owners", "'a'", "weight"]),
        ('[models]\na = { pth = "x" }', ["[models]", "'a'", "path"]),
        ("[models]\na.b = 'x'", ["[models]", "'a'", "quote"]),
        ("[models]\na = ''", ["[models]", "NAME=PATH"]),
        ("[server", ["openrl.toml", "not valid TOML"]),
    ],
)
def test_a_fault_in_the_file_is_named(toml, text: str, says: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load(env={}, file=toml(text))
    for words in says:
        assert words in caught.value.message


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"OPENRL_ENGINE__THRED": "1"}, ["OPENRL_ENGINE__THRED", "engine.threads"]),
        ({"OPENRL_ENGIN__THREADS": "1"}, ["OPENRL_ENGIN__THREADS", "sections"]),
        ({"OPENRL_ENGINE__THREADS": "many"}, ["OPENRL_ENGINE__THREADS", "'many'", "whole number"]),
        ({"OPENRL_ENGINE__THREADS": "-1"}, ["OPENRL_ENGINE__THREADS", "at least 1"]),
        ({"OPENRL_PORT": "9000"}, ["OPENRL_PORT", "OPENRL_SERVER__PORT"]),
        ({"OPENRL_ENGINE_DTYPE": "float32"}, ["OPENRL_ENGINE__DTYPE"]),
        ({"OMP_NUM_THREADS": "x"}, ["OMP_NUM_THREADS", "whole number"]),
        ({"OPENRL_MODELS": "a,a=b"}, ["OPENRL_MODELS", "'a'", "twice"]),
        ({"OPENRL_MODELS": "=b"}, ["OPENRL_MODELS", "NAME=PATH"]),
        ({"OPENRL_SCHEDULER__OWNER_WEIGHTS": "a"}, ["OWNER_WEIGHTS", "names"]),
    ],
)
def test_a_fault_in_the_environment_is_named(env: dict[str, str], says: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load(env=env)
    for words in says:
        assert words in caught.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nope\.toml: No such file"):
        config.load(env={}, file=tmp_path / "nope.toml")


def test_every_default_can_be_said_and_every_key_says_what_it_takes() -> None:
    """A field of a new type needs words in `expected`, and must accept its own default."""
    defaults = Config(models=())
    sections = {key.partition(".")[0] for key in config.known_keys()} - {"server"}
    owners = {"server": defaults} | {name: getattr(defaults, name) for name in sections}
    settings = {}
    for key, hint in config.known_keys().items():
        section, name = key.split(".")
        value = getattr(owners[section], name)
        settings[key] = Setting(key, str(value) if isinstance(value, Path) else value, "here")
        assert len(config.expected(hint)) > 3, key
    assert config.build(settings) == defaults
    fields = sum(len(get_type_hints(type(owner))) for owner in owners.values())
    assert len(settings) == fields - len({"models", *owners} - {"server"})


# --- threads --------------------------------------------------------------------------------


def cpus(root: Path, *siblings: str) -> Path:
    for cpu, group in enumerate(siblings):
        topology = root / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(group)
    return root


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 2), ("250000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), (None, 2)],
)
def test_cores_are_physical_and_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    where = cpus(tmp_path, "0,1", "0,1", "2,3", "2,3")  # CPU 3 is not ours
    limit = tmp_path / "cpu.max"
    if quota:
        limit.write_text(quota)
    assert threads.usable_cores(where, limit) == cores


def test_settled_threads_reach_openmp_and_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    environ: dict[str, str] = {}
    chosen = dataclasses.replace(Config(models=()), engine=EngineConfig(threads=3))
    assert threads.settle(chosen, environ) == chosen
    assert environ == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE"}


def test_threads_cannot_be_settled_after_torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", object())
    with pytest.raises(AssertionError, match="before torch"):
        threads.settle(Config(models=()), {})


def test_torch_computes_with_the_settled_threads() -> None:
    """In a process of its own, as the server does it; OpenMP itself confirms the policy."""
    script = (
        "from openrl import config, threads; from openrl.settings import Setting;"
        "flags = [Setting('engine.threads', 2, 'here')];"
        "threads.settle(config.load(flags), config.environ);"
        "import torch; print(torch.get_num_threads())"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**env, "OMP_NUM_THREADS": "1", "OMP_DISPLAY_ENV": "true"},
    )
    assert done.stdout.strip() == "2"
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr


def test_show_prints_no_secret() -> None:
    secret = "tml-" + "s" * 24
    loaded = config.load([flag("server.admin_key", secret)], {})
    assert loaded.admin_key == secret
    assert secret not in "\n".join(toml_lines(loaded, {}))


def test_what_show_prints_can_be_read_again(toml) -> None:
    flags = [
        Setting(MODELS, ('a"b=/x y', "c"), "--model", text=True),
        flag("scheduler.owner_weights", "ü=2"),
        flag("server.data", "/da ta"),
        flag("engine.wait_policy", "active"),
    ]
    loaded = config.load(flags, {})
    assert config.load(env={}, file=toml("\n".join(toml_lines(loaded, {})))) == loaded


def test_an_owners_quota_is_a_table_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "openrl.toml"
    file.write_text("[scheduler.owners.alice]\nmax_models = 2\nweight = 1.5\n")
    given = config.load(env={}, file=file).scheduler.owners
    assert given == {"alice": OwnerQuota(max_models=2, weight=1.5)}
