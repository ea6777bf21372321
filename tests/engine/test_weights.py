"""What an engine's identity says: all that decides its blocks' bytes, or that it cannot be said."""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connectors import weights
from connectors.weights import UnnamedError, fingerprint
from tests.engine.facts import (
    IMPORTS_VLLM,
    WEIGHTS,
    facts,
    hf_config,
    identity,
    images,
    model,
    registry,
    speculation,
    stand_in,
    with_weights,
)

pytestmark = [*IMPORTS_VLLM, pytest.mark.usefixtures("home")]


def aged(place: Path) -> None:
    """Wait until a file is old enough to be remembered."""
    while time.time_ns() - place.stat().st_ctime_ns < weights._RACY_NS:
        time.sleep(0.05)


def eagle(folder: Path, content: bytes = b"drafter", **changes: object) -> SimpleNamespace:
    drafter = model(with_weights(folder, content), **changes)
    return speculation("eagle", draft_model_config=drafter)


# Identity


@pytest.mark.parametrize(
    ("change", "trait"),
    [
        ({"dtype": "torch.float16"}, "dtype"),
        ({"cache_dtype": "fp8"}, "cache dtype"),
        ({"quantization": "awq"}, "quantization"),
        ({"hf_config": hf_config(layers=5)}, "config"),
        ({"hf_config": hf_config(layers=4, rope_theta=1.0)}, "config"),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, "hash"),
        ({"registry": registry(stand_in("Other"))}, "engine"),
        ({"load_format": "pt"}, "loading"),
        ({"multimodal_config": images(mm_processor_kwargs={"max_pixels": 9})}, "config"),
    ],
)
def test_B3_whatever_changes_an_engines_identity_changes_a_trait(
    tmp_path: Path, change: dict[str, Any], trait: str
) -> None:
    folder = with_weights(tmp_path / "model")
    before, traits, unnamed = identity(facts(folder))
    after, changed, _ = identity(facts(folder, **change))
    assert unnamed == ""
    assert after != before
    different = {name for name in traits if changed[name] != traits[name]}
    assert different - {"hash seed"} == {trait}


def test_B3_a_drafters_weights_and_configuration_count(tmp_path: Path) -> None:
    folder = with_weights(tmp_path / "model")
    found = [
        identity(facts(folder, speculative_config=speculative))
        for speculative in (
            None,
            speculation("suffix"),
            speculation("medusa"),
            eagle(tmp_path / "a"),
            eagle(tmp_path / "b", b"Drafter"),
            eagle(tmp_path / "c", hf_config=hf_config(layers=9)),
            eagle(tmp_path / "d", quantization="fp8"),
            eagle(tmp_path / "e", dtype="torch.float16"),
        )
    ]
    assert found[0] == found[1], "what drafts without a model leaves no KV"
    assert len({digest for digest, _, _ in found}) == 7
    assert len({traits["drafter"] for _, traits, _ in found}) == 7
    again = identity(facts(folder, speculative_config=eagle(tmp_path / "f")))
    assert again == found[3]
    lost = eagle(tmp_path / "g")
    lost.draft_model_config.model = "org/drafter"
    assert "org/drafter" in identity(facts(folder, speculative_config=lost))[2]


def test_B3_another_vllm_may_lay_out_pages_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from connectors import vllm_identity

    folder = with_weights(tmp_path / "model")
    found = [identity(facts(folder))[0]]
    monkeypatch.setattr(vllm_identity, "VERSION", "0.31")
    found.append(identity(facts(folder))[0])
    assert found[0] != found[1]


def test_B3_a_data_type_said_or_taken_is_the_same(tmp_path: Path) -> None:
    folder = with_weights(tmp_path / "model")
    one = identity(facts(folder, dtype="torch.bfloat16", cache_dtype="auto"))
    assert identity(facts(folder, dtype="torch.bfloat16", cache_dtype="bfloat16")) == one
    assert identity(facts(folder, dtype="torch.bfloat16", cache_dtype="float16"))[0] != one[0]
    fp8, same, other = (
        identity(facts(folder, cache_dtype=name)) for name in ("fp8", "fp8_e4m3", "fp8_e5m2")
    )
    assert fp8 == same
    assert fp8[0] not in (one[0], other[0])


def test_B3_the_same_weights_elsewhere_are_the_same_model(tmp_path: Path) -> None:
    found = [
        identity(facts(with_weights(tmp_path / name, content)))
        for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2"))
    ]
    (one, named, _), (same, _, _), (other, changed, _) = found
    assert one == same != other
    assert named["model"] == "a"
    assert named["weights"] != changed["weights"]


# Weights that have no name


@pytest.mark.parametrize(
    "load_format", ["dummy", "tensorizer", "modelexpress", "ipc_cache", "of-a-plug-in"]
)
def test_B3_weights_that_are_made_up_or_come_from_elsewhere_have_no_name(
    tmp_path: Path, load_format: str
) -> None:
    folder = with_weights(tmp_path / "model")
    _, traits, unnamed = identity(facts(folder, load_format=load_format))
    assert unnamed == f"load_format '{load_format}', expected one that reads files"
    assert traits["weights"] == "not named"


@pytest.mark.parametrize(
    ("version", "cpu", "lora", "named"),
    [
        ("0.32", True, True, False),
        ("0.32", True, False, True),
        ("0.32", False, True, True),
        ("0.33", True, True, True),
    ],
)
def test_B3_an_engine_whose_adapters_leak_into_other_requests_has_no_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    *,
    cpu: bool,
    lora: bool,
    named: bool,
) -> None:
    from connectors import vllm_identity

    monkeypatch.setattr(vllm_identity, "VERSION", version)
    platform = SimpleNamespace(is_cpu=lambda: cpu)
    monkeypatch.setattr(vllm_identity, "current_platform", platform)
    config = facts(with_weights(tmp_path), lora_config=SimpleNamespace() if lora else None)
    assert (identity(config)[2] == "") is named


def test_B3_weights_that_are_not_on_this_machine_have_no_name(tmp_path: Path) -> None:
    folder = with_weights(tmp_path / "model")
    assert identity(facts(folder, model_weights="s3://bucket/model"))[2] == (
        "the weights come from s3://bucket/model, expected local files"
    )
    for name in ("s3://bucket/model", "org/model", "nothing", "org/model:Q4_K_M"):
        assert identity(facts(name))[2] == (
            f"{name} at main is neither a path nor in the local Hugging Face cache"
        )
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert identity(facts(tmp_path / "empty"))[2] == f"no weight files in {tmp_path / 'empty'}"
    (tmp_path / "empty" / WEIGHTS).symlink_to("nowhere")
    assert "No such file" in identity(facts(tmp_path / "empty"))[2]


class Hub:
    """A local Hugging Face cache: blobs, commits that link to them, and branches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "models--org--model"

    def commit(self, digit: str, content: bytes, branch: str = "main") -> str:
        commit = digit * 40
        blob = self.model / "blobs" / digit
        for made in (blob.parent, self.model / "refs", self.model / "snapshots" / commit):
            made.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        (self.model / "snapshots" / commit / WEIGHTS).symlink_to(f"../../blobs/{digit}")
        (self.model / "refs" / branch).write_text(commit)
        return commit

    def identity(self, **changes: object) -> tuple[str, dict[str, str], str]:
        return identity(facts("org/model", download_dir=str(self.folder), **changes))


def test_B3_a_hubs_branch_that_moved_is_another_model(tmp_path: Path) -> None:
    hub = Hub(tmp_path / "hub")
    first = hub.commit("a", b"1")
    before = hub.identity()
    assert before[2] == ""
    assert before[1]["model"] == "org/model"
    hub.commit("b", b"2")
    after = hub.identity()
    assert after[2] == ""
    assert after[0] != before[0]
    assert after[1]["weights"] != before[1]["weights"]
    assert hub.identity(revision=first) == before
    folder = with_weights(tmp_path / "model", b"2")  # as offline mode gives it
    assert identity(facts(folder))[0] == after[0]
    hub.commit("c", b"3", branch="next")
    assert hub.identity()[0] == after[0]
    assert hub.identity(revision="next")[0] not in (before[0], after[0])


def test_B3_a_branch_that_moves_while_an_engine_starts_has_no_name(tmp_path: Path) -> None:
    hub = Hub(tmp_path / "hub")
    first, config = hub.commit("a", b"1"), hf_config(layers=4)
    config._commit_hash = first
    assert hub.identity(hf_config=config)[2] == ""
    second = hub.commit("b", b"2")
    assert hub.identity(hf_config=config)[2] == (
        "org/model moved while the engine started: its configuration is of commit"
        f" {first}, its weights are of {second}"
    )


def test_B3_a_model_from_another_hub_is_not_looked_for_in_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may have other weights under the same name."""
    hub = Hub(tmp_path / "hub")
    hub.commit("a", b"1")
    assert hub.identity()[2] == ""
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    told = "org/model comes from ModelScope, expected a path or Hugging Face"
    assert hub.identity()[2] == told
    assert identity(facts(with_weights(tmp_path / "model")))[2] == ""


def test_B3_parts_that_are_models_of_their_own_count(tmp_path: Path) -> None:
    """Such as Ultravox's: its configuration names an encoder and a language model."""
    folder, hub = with_weights(tmp_path / "model"), Hub(tmp_path / "hub")
    config = hf_config(layers=4)
    config.audio_model_id, config.text_model_id = None, "org/model"

    def found() -> tuple[str, str]:
        engine = facts(folder, hf_config=config, download_dir=str(hub.folder))
        digest, _, unnamed = identity(engine)
        return digest, unnamed

    lost = "org/model at main is neither a path nor in the local Hugging Face cache"
    assert found()[1] == lost
    hub.commit("a", b"1")
    before, unnamed = found()
    assert unnamed == ""
    hub.commit("b", b"2")
    assert found()[0] != before


@pytest.mark.parametrize("where", ["config", "preprocessor"])
def test_B3_code_of_another_repository_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Fine-tuned models name the code of the model that they were made from."""
    folder, hub = with_weights(tmp_path / "model"), Hub(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.folder))
    named = {"auto_map": {"AutoModel": "org/model--modeling.Model"}}
    config = hf_config(layers=4, **named if where == "config" else {})
    if where == "preprocessor":
        (folder / "preprocessor_config.json").write_text(json.dumps(named))

    def found(**changes: object) -> str:
        digest, _, unnamed = identity(facts(folder, hf_config=config, **changes))
        assert unnamed == ""
        return digest

    trusted: dict[str, Any] = {"trust_remote_code": True}
    without = found(**trusted)  # it is not in the cache: vLLM has code of its own
    assert without == found()
    first = hub.commit("a", b"1")
    before = found(**trusted)
    hub.commit("b", b"2")
    assert len({without, before, found(**trusted)}) == 3
    assert found() == without
    if where == "config":
        pinned = {"code_revision": first}
        moved = found(**trusted, **pinned)
        hub.commit("c", b"3")
        assert found(**trusted, **pinned) == moved


def test_B3_no_other_model_of_vllms_has_parts_elsewhere() -> None:
    """A version with one fails here."""
    import vllm

    from connectors.vllm_identity import OTHER_MODELS

    root, places = Path(vllm.__file__).parent, set()
    for path in [*root.glob("model_executor/models/**/*.py"), *root.glob("models/**/*.py")]:
        code = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(code)) if "DefaultModelLoader.Source" in code else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".Source"):
                places |= {ast.unparse(a.value) for a in node.keywords if a.arg == "model_or_path"}
    assert {f"config.{name}" for name in OTHER_MODELS} <= places
    assert {place for place in places if not place.endswith("model_config.model")} == {
        f"config.{name}" for name in OTHER_MODELS
    }


# Files


@pytest.mark.parametrize(
    "name",
    [
        *("a.safetensors", "a.bin", "a.pt", "a.pth", "a.gguf", "deep/er/a.safetensors"),
        *("modeling_own.py", "model.safetensors.index.json", "hf_quant_config.json"),
        *("quantize_config.json", "kv_cache_scales.json", "preprocessor_config.json"),
    ],
)
def test_B3_any_file_that_decides_the_weights_counts(tmp_path: Path, name: str) -> None:
    folder = with_weights(tmp_path)
    found = {fingerprint(folder, None)}
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for content in (b"1", b"2"):
        (folder / name).write_bytes(content)
        found.add(fingerprint(folder, None))
    assert len(found) == 3
    (folder / name).rename(folder / f"other-{Path(name).name}")
    assert fingerprint(folder, None) not in found


def test_B3_what_is_said_to_people_does_not_count(tmp_path: Path) -> None:
    folder = with_weights(tmp_path)
    before = fingerprint(folder, None)
    for name in ("README.md", "chat_template.jinja", "tokenizer.json", "config.json"):
        (folder / name).write_text("{}")
    assert fingerprint(folder, None) == before


def test_B3_one_changed_value_in_a_large_file_is_seen(tmp_path: Path) -> None:
    """Samples see none of this: 2 bytes of a shard, its size and time stamp as before."""
    file = with_weights(tmp_path) / "shard.safetensors"
    with file.open("wb") as out:
        out.truncate(256 << 20)
    aged(file)
    memory = tmp_path / "memory"
    before, state = fingerprint(tmp_path, memory), file.stat()
    with file.open("r+b") as out:
        out.seek(77 << 20)
        out.write(b"\1\2")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert file.stat().st_mtime_ns == state.st_mtime_ns
    assert fingerprint(tmp_path, memory) != before


def test_B3_a_single_file_is_a_model(tmp_path: Path) -> None:
    one, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    for file in (one, other):
        file.write_bytes(b"weights")
    assert identity(facts(one))[0] == identity(facts(other))[0]
    other.write_bytes(b"Weights")
    assert identity(facts(one))[0] != identity(facts(other))[0]
    assert identity(facts(one))[1]["model"] == "a.gguf"


def test_B3_folders_that_link_to_themselves_are_read_once(tmp_path: Path) -> None:
    folder = with_weights(tmp_path / "model")
    before = fingerprint(folder, None)
    (folder / "round").symlink_to(folder)
    assert fingerprint(folder, None) == before
    os.mkfifo(folder / "pipe.bin.fifo")
    assert fingerprint(folder, None) == before


def test_B3_files_that_are_none_or_change_meanwhile_have_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_weights(tmp_path / "model")
    (folder / "null.bin").symlink_to("/dev/null")
    with pytest.raises(UnnamedError, match="no regular file"):
        fingerprint(folder, None)
    (folder / "null.bin").unlink()
    digest = hashlib.file_digest

    def slow(source: Any, kind: str) -> Any:
        found = digest(source, kind)
        with (folder / WEIGHTS).open("ab") as out:
            out.write(b"more")
        return found

    monkeypatch.setattr(hashlib, "file_digest", slow)
    with pytest.raises(UnnamedError, match="changed while it was read"):
        fingerprint(folder, None)


# What is remembered of files


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read whole."""
    found: list[str] = []
    digest = hashlib.file_digest

    def noted(source: Any, kind: str) -> Any:
        found.append(Path(source.name).name)
        return digest(source, kind)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    return found


def test_B3_files_are_read_once_and_again_when_they_change(
    tmp_path: Path, reads: list[str]
) -> None:
    folder, memory = with_weights(tmp_path / "model"), tmp_path / "a" / "memory"
    aged(folder / WEIGHTS)
    before = fingerprint(folder, memory)
    assert fingerprint(folder, memory) == before
    assert reads == [WEIGHTS]
    assert (memory.stat().st_mode & 0o777, (memory / "weights.json").stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )
    with_weights(folder, b"WEIGHTS")
    assert fingerprint(folder, memory) != before
    assert reads == [WEIGHTS, WEIGHTS]


def test_B3_a_file_that_has_just_changed_is_not_remembered(
    tmp_path: Path, reads: list[str]
) -> None:
    """It could change again without another time stamp."""
    folder, memory = with_weights(tmp_path / "model"), tmp_path / "memory"
    fingerprint(folder, memory)
    fingerprint(folder, memory)
    assert reads == [WEIGHTS, WEIGHTS]


def test_B3_nothing_is_believed_that_another_user_can_write(
    tmp_path: Path, reads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, memory = with_weights(tmp_path / "model"), tmp_path / "memory"
    aged(folder / WEIGHTS)
    true = fingerprint(folder, memory)
    known = json.loads((memory / "weights.json").read_text())
    lie = json.dumps(dict.fromkeys(known, "0" * 64))
    (memory / "weights.json").write_text(lie)
    assert fingerprint(folder, memory) != true  # so it is used
    memory.chmod(0o770)
    assert fingerprint(folder, memory) == true
    assert "expected user" in caplog.text
    memory.chmod(0o700)
    if os.getuid() == 0:
        os.chown(memory, 65534, 65534)
        assert fingerprint(folder, memory) == true
        os.chown(memory, 0, 0)
    memory.rename(tmp_path / "moved")
    memory.symlink_to(tmp_path / "moved")
    assert fingerprint(folder, memory) == true
    assert len(reads) >= 3


@pytest.mark.parametrize("junk", [b"", b"{", b"[1]", b"[" * 100_000, b"\xff\xfe"])
def test_B3_a_damaged_memory_is_read_over(tmp_path: Path, junk: bytes) -> None:
    folder, memory = with_weights(tmp_path / "model"), tmp_path / "memory"
    aged(folder / WEIGHTS)
    before = fingerprint(folder, memory)
    (memory / "weights.json").write_bytes(junk)
    assert fingerprint(folder, memory) == before
    assert len(json.loads((memory / "weights.json").read_text())) == 1


def test_B3_without_a_place_to_remember_all_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reads: list[str]
) -> None:
    folder, memory = with_weights(tmp_path / "model"), tmp_path / "file"
    memory.write_text("")
    aged(folder / WEIGHTS)
    with caplog.at_level(logging.INFO):
        assert fingerprint(folder, memory) == fingerprint(folder, None)
    assert "not kept in" in caplog.text
    assert len(reads) == 2


def test_B3_a_user_without_a_home_has_all_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_weights(tmp_path / "model")
    expected = identity(facts(folder))
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as of a number in a container
    assert identity(facts(folder)) == expected


def test_B3_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_REMEMBERED_MAX", 3)
    folder, memory = with_weights(tmp_path / "model"), tmp_path / "memory"
    for number in range(5):
        (folder / f"{number}.bin").write_bytes(b"x")
    aged(folder / "4.bin")
    before = fingerprint(folder, memory)
    assert len(json.loads((memory / "weights.json").read_text())) == 3
    assert fingerprint(folder, memory) == before


def test_O22_another_version_of_a_plug_ins_model_code_is_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class keeps its name; what it computes is in its package's files."""
    import importlib
    import sys

    from vllm.model_executor.models.llama import LlamaForCausalLM

    from connectors.vllm_identity import _code_of

    package = tmp_path / "plug_in_of_a_test"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("class Top: ...\n")
    (package / "ops.py").write_text("SCALE = 1\n")
    (package / "models" / "__init__.py").write_text("class Model: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        model = importlib.import_module("plug_in_of_a_test.models").Model
        top = importlib.import_module("plug_in_of_a_test").Top
        seen = {_code_of(model)}
        assert seen == {_code_of(top)}
        (package / "ops.py").write_text("SCALE = 2\n")
        assert seen.isdisjoint({_code_of(model), _code_of(top)})
        seen.add(_code_of(model))
        (package / "compiled.so").write_bytes(b"code")
        assert _code_of(model) not in seen
    finally:
        for name in ("plug_in_of_a_test", "plug_in_of_a_test.models"):
            sys.modules.pop(name, None)
    with pytest.raises(UnnamedError, match="the code of Nowhere is in no file"):
        _code_of(type("Nowhere", (), {"__module__": "made_up"}))
    assert _code_of(LlamaForCausalLM) == "", "vLLM's version is a trait of its own"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnnamedError, match="no code in "):
        weights.code_fingerprint(tmp_path / "empty")
