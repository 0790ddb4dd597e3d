from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from transformers import AutoTokenizer

from openrl import demo
from openrl.config import ModelSource
from openrl.engines.pytorch.model_files import read_info, weights_directory
from openrl.errors import UserError


def _write(directory, generation=None, **config):
    directory.mkdir(exist_ok=True)
    text = {"vocab_size": 11, "max_position_embeddings": 64, "architectures": ["XForCausalLM"]}
    (directory / "config.json").write_text(json.dumps({**text, **config}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_what_a_directory_says(tmp_path):
    directory = _write(tmp_path / "m", generation={"eos_token_id": [7, 3]}, eos_token_id=3)
    info = read_info(ModelSource("Org/Model", directory), max_lora_rank=32)
    assert info.name == info.tokenizer_id == "Org/Model"
    assert (info.context_length, info.vocab_size, info.max_lora_rank) == (64, 11, 32)
    assert info.eos_token_ids == (7, 3)
    assert info.architecture == "XForCausalLM"


def test_the_demo_models_tokenizer_is_where_its_files_are():
    info = read_info(ModelSource(demo.NAME, demo.model_directory()), 8)
    assert AutoTokenizer.from_pretrained(info.tokenizer_id).vocab_size <= info.vocab_size


def test_names_that_lead_to_one_directory_share_weights(tmp_path):
    directory = _write(tmp_path / "m")
    (tmp_path / "link").symlink_to(directory)
    one = read_info(ModelSource("A/One", directory), 8)
    two = read_info(ModelSource("B/Two", tmp_path / "link"), 8)
    other = read_info(ModelSource("C/Three", _write(tmp_path / "other")), 8)
    assert one.weights == two.weights != other.weights
    assert two.tokenizer_id == "B/Two"


def test_a_name_may_be_a_directory_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Org").mkdir()
    _write(tmp_path / "Org" / "Model")
    (tmp_path / "Org" / "Model" / "model.safetensors").write_bytes(b"")
    source = ModelSource("Org/Model")
    assert read_info(source, 8).vocab_size == 11
    assert weights_directory(source).resolve() == tmp_path / "Org" / "Model"


def test_settings_of_the_text_part_count(tmp_path):
    directory = _write(tmp_path / "m", text_config={"vocab_size": 5, "max_position_embeddings": 9})
    info = read_info(ModelSource("m", directory), 8)
    assert (info.vocab_size, info.context_length, info.eos_token_ids) == (5, 9, ())


def test_a_path_that_is_no_model_says_so(tmp_path):
    with pytest.raises(UserError, match="there is no directory"):
        read_info(ModelSource("m", tmp_path / "nowhere"), 8)
    with pytest.raises(UserError, match=r"holds no config\.json"):
        read_info(ModelSource("m", tmp_path), 8)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_info(ModelSource("m", tmp_path), 8)


def test_a_hub_name_without_cache_and_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"not in the hub's cache .*Org/Nothing=PATH"):
        read_info(ModelSource("Org/Nothing"), 8)
    with pytest.raises(UserError, match="neither a local directory nor a model"):
        read_info(ModelSource("not a name!"), 8)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that refuses every model; gives the means to say why."""

    class Refusal(BaseHTTPRequestHandler):
        status, reason = 500, ""

        def do_GET(self):
            self.send_response(self.status)
            self.send_header("X-Error-Code", self.reason)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Refusal) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        yield Refusal
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "reason", "advice"),
    [
        (403, "GatedRepo", r"Org/X is gated: accept its terms .*`hf auth login`.*Org/X=PATH"),
        (404, "RepoNotFound", r"nor a model that the hub knows: check the name.*Org/X=PATH"),
        (401, "RepoNotFound", r"nor a model that the hub knows: .*log in if it is private"),
        (500, "", r"the hub cannot be reached: give a local directory \(Org/X=PATH\)"),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(hub, status, reason, advice):
    hub.status, hub.reason = status, reason
    with pytest.raises(UserError, match=advice):
        read_info(ModelSource("Org/X"), 8)
