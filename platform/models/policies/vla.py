"""The vision-language-action policy: a language model reads an image and an instruction and selects action bins.

An observation is one sequence: the instruction's tokens, the image's positions, one query per action component. The
last hidden states of the queries give logits over bins in one pass. Components are therefore independent given the
observation, as those of a diagonal Gaussian. Rollout and training compute the same function without a cache. (Decoding
component by component would cost one pass each, but could model dependence between them.) Instructions come first: each
is computed once for all rows that share it.

Parallel decoding as in Kim et al., "Fine-Tuning Vision-Language-Action Models" (2025), OpenVLA-OFT; bins as in Brohan
et al., "RT-1" (2022).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rl_platform.config.schema.models import Model
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.attention import Features, is_plain
from rl_platform.models.causal_lm import load_causal_lm, quiet_transformers
from rl_platform.models.draws import Among, choices
from rl_platform.models.language import LanguageModel
from rl_platform.models.policies.vision import ImageEncoder
from rl_platform.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")  # options of a language model, one for each layer


class InstructedAttention:
    """Causal attention over T instructions of W tokens, padded on the right, followed by B rows of S positions.

    A row attends to its own instruction and to itself. tasks [B] int64: the instruction of each row; lengths [B]: its
    number of tokens.
    """

    def __init__(self, instructions: int, words: int, tasks: Tensor, lengths: Tensor, positions: int) -> None:
        self._count, self._words, self._tasks, self._positions = instructions, words, tasks, positions
        sees_word = torch.arange(words, device=tasks.device) < lengths[:, None]
        sees_own = torch.ones(positions, positions, dtype=torch.bool, device=tasks.device).tril()
        parts = sees_word[:, None].expand(-1, positions, -1), sees_own.expand(tasks.shape[0], -1, -1)
        self._mask = torch.cat(parts, dim=2)[:, None]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, features: Features | None = None
    ) -> Tensor:
        """query [1,Hq,N,D], key and value [1,Hkv,N,D], N = T W + B S -> [N,Hq,D]."""
        assert features is None or (features.softcap, features.sinks) == (None, None)
        if (repeat := query.shape[1] // key.shape[1]) > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        instruction, own = zip(*(self._parts(tensor) for tensor in (query, key, value)), strict=True)
        first = F.scaled_dot_product_attention(*instruction, is_causal=True, scale=scaling)
        seen = [
            torch.cat([word.index_select(0, self._tasks), rest], dim=2)
            for word, rest in zip(instruction[1:], own[1:], strict=True)
        ]
        then = F.scaled_dot_product_attention(own[0], *seen, attn_mask=self._mask, scale=scaling)
        return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in (first, then)])

    def _parts(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """[1,H,N,D] -> instructions [T,H,W,D], rows [B,H,S,D]."""
        flat, begin = tensor[0].transpose(0, 1), self._count * self._words
        instruction = flat[:begin].unflatten(0, (self._count, self._words))
        return instruction.transpose(1, 2), flat[begin:].unflatten(0, (-1, self._positions)).transpose(1, 2)


class VisionLanguagePolicy(nn.Module):
    """Categorical policy over D components (1 for a discrete action) of `choices` bins each.

    An action is the bins [D]; its log-prob is the sum over components. `executed` maps bins to the environment's
    action: they divide the range from lower to upper bound evenly, bounds included. `language` has the value head.
    Both heads start at zero, which gives uniform actions and values of 0. Image features and queries start at the scale
    of the token embeddings.

    instructions: token ids [L] int64 of each task; with several, `tasks` [B] int64 selects the instruction of each row.
    Of the embedding matrix only their rows [T,L,H] are stored, frozen, as no other token is read.
    """

    def __init__(
        self,
        language: LanguageModel,
        instructions: Sequence[Tensor],
        encoder: ImageEncoder,
        spaces: EnvSpaces,
        bins: int,
    ) -> None:
        super().__init__()
        self.language, self.encoder = language, encoder
        continuous, width = spaces.action.kind == "continuous", language.config.hidden_size
        self.action_space = spaces.action
        self.components = spaces.action.size if continuous else 1
        self.choices = bins if continuous else spaces.action.size
        vocabulary = language.backbone.get_input_embeddings().weight.detach()
        self.words = nn.Parameter(vocabulary[pad_sequence(list(instructions), batch_first=True)], requires_grad=False)
        language.backbone.set_input_embeddings(None)
        size = float(vocabulary.square().mean().sqrt())
        self.project = nn.Linear(encoder.channels, width)
        self.norm = nn.RMSNorm(width)
        nn.init.constant_(self.norm.weight, size)
        self.queries = nn.Parameter(size * torch.randn(self.components, width))
        self.action_head = nn.Linear(width, self.choices)
        nn.init.zeros_(self.action_head.weight)
        nn.init.zeros_(self.action_head.bias)
        low, high = torch.tensor(spaces.action_low), torch.tensor(spaces.action_high)
        self.lengths = [len(instruction) for instruction in instructions]
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("step", (high - low) / (self.choices - 1), persistent=False)

    @property
    def language_config(self) -> PretrainedConfig:
        return self.language.config

    @property
    def adapted(self) -> nn.Module:
        """The part that adapters are added to."""
        return self.language.backbone

    def forward(self, observations: Tensor, tasks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Images [B,D'] uint8 -> logits [B,D,choices] and values [B], both float32."""
        pictures = self.norm(self.project(self.encoder.places(observations.float() / 255)).float())
        rows, places, _ = pictures.shape
        rest = torch.cat([pictures, self.queries.expand(rows, -1, -1)], dim=1)
        states = self._states(rest, tasks)
        with torch.autocast(states.device.type, enabled=False):
            logits = self.action_head(states[:, places:].float())
            # the state of the last image position, before any query
            values = self.language.head(states[:, places - 1].float()).squeeze(-1)
        return logits, values

    def _states(self, rest: Tensor, tasks: Tensor | None) -> Tensor:
        """rest [B,S,H]: embeddings that follow the instruction -> their last hidden states [B,S,H]."""
        (rows, length, width), device = rest.shape, rest.device
        tasks = tasks_of_rows(tasks, len(self.lengths), rest)
        count, longest, _ = self.words.shape
        lengths = torch.tensor(self.lengths, device=device)[tasks]
        after = lengths[:, None] + torch.arange(length, device=device)
        positions = torch.cat([torch.arange(longest, device=device).repeat(count), after.flatten()])
        output = self.language.backbone(
            inputs_embeds=torch.cat([self.words.flatten(0, 1), rest.flatten(0, 1)])[None],
            position_ids=positions[None],
            attention=InstructedAttention(count, longest, tasks, lengths, length),
            use_cache=False,
        )
        states: Tensor = output.last_hidden_state[0, count * longest :].view(rows, length, width)
        return states

    @torch.no_grad()
    def act(
        self,
        observations: Tensor,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
        among: Among = None,
        tasks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Samples as `ActorCriticPolicy.act`: observations [N,D'] uint8 -> bins [N,D] int64, log_probs [N]."""
        log_probs = self(observations, tasks)[0].log_softmax(-1)
        bins = choices(log_probs, generator, deterministic, among)
        return bins, _of_action(log_probs, bins)

    def evaluate(
        self, observations: Tensor, actions: Tensor, tasks: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluates bins, with gradients: observations [B,D'], bins [B,D] -> log_probs, entropy, values [B]."""
        logits, values = self(observations, tasks)
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1).sum(-1)
        return _of_action(log_probs, actions), entropy, values

    def executed(self, actions: Tensor) -> Tensor:
        """bins [N,D] -> actions [N,A] float32 between the bounds, or choices [N]."""
        return self.low + actions * self.step if self.action_space.kind == "continuous" else actions.squeeze(-1)


def _of_action(log_probs: Tensor, bins: Tensor) -> Tensor:
    """[N,D,choices], [N,D] -> [N]: the log-probs of independent components add up."""
    return log_probs.gather(-1, bins[..., None]).squeeze(-1).sum(-1)


def vision_language_policy(
    model: Model, spaces: EnvSpaces, seed: int, instructions: Sequence[str] = ()
) -> VisionLanguagePolicy:
    """Returns the policy of section `model`.

    A random language model depends on `seed`, other new parameters on torch's global generator. instructions: one per
    task; empty: the section's own.

    Raises ConfigError if there is nothing to load, or if the model reads fewer positions than a sequence has.
    """
    tokenizer = load_tokenizer(model)
    network = load_causal_lm(model, tokenizer.vocab_size, tokenizer.eos_token_ids[0], seed)
    if model.backbone_layers is not None:
        _keep_first_layers(network, model.backbone_layers)
    texts = instructions or (model.instruction or "",)
    tokens = [tokenizer.encode(text) for text in texts]
    check_words(tokens, len(network.get_input_embeddings().weight))
    policy = _assembled(model, spaces, network, [torch.tensor(each) for each in tokens])
    length = max(policy.lengths) + policy.encoder.positions + policy.components
    if length > (readable := getattr(network.config, "max_position_embeddings", length)):
        message = f"instruction, picture and action are {length} tokens, the language model reads {readable}"
        hint = "a shorter instruction, or convolutions (actor.model.cnn) that leave fewer places"
        key = "actor.model.instruction" if len(texts) == 1 else "env.tasks"
        raise ConfigError([Problem(key, message, hint=hint)])
    refuse_features(network.config, model.path, length)
    if not model.train_backbone:
        policy.language.backbone.requires_grad_(False)
    return policy


def policy_without_weights(
    model: Model, spaces: EnvSpaces, config: Mapping[str, object], lengths: Sequence[int]
) -> VisionLanguagePolicy:
    """Returns a policy whose parameters are to be loaded. config: of its language model; lengths: tokens of each
    instruction."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet_transformers():
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    return _assembled(model, spaces, network, [torch.zeros(length, dtype=torch.int64) for length in lengths])


def _assembled(
    model: Model, spaces: EnvSpaces, network: PreTrainedModel, instructions: Sequence[Tensor]
) -> VisionLanguagePolicy:
    encoder = ImageEncoder(spaces.observation_shape, model.cnn)
    language = LanguageModel(network, value_head=True)
    return VisionLanguagePolicy(language, instructions, encoder, spaces, model.action_bins)


def check_words(instructions: Sequence[Sequence[int]], known: int, images: Collection[int] = ()) -> None:
    """Raises ConfigError if an instruction has a token that is not among the `known` first ones, or one of `images`.

    images: tokens in whose places the model reads pictures.
    """
    largest = max((token for each in instructions for token in each), default=0)
    if largest >= known:
        message = f"an instruction has the token {largest}, and the model has tokens 0 to {known - 1} only"
        raise ConfigError([Problem("actor.model.tokenizer", message, hint="the tokenizer of this model")])
    if any(token in images for each in instructions for token in each):
        message = "an instruction has a token that stands for an image; the images of an observation come before it"
        raise ConfigError([Problem("actor.model.instruction", message, hint="the text alone, without <image>")])


def refuse_features(config: PretrainedConfig, path: str | None, length: int) -> None:
    """Raises ConfigError for a language model whose attention over `length` tokens is not plain."""
    if not is_plain(config, length):
        message = f"{config.model_type} has windows, capped scores or sinks, which this policy does not compute"
        raise ConfigError([Problem("actor.model.path", message, value=path or "")])


def _keep_first_layers(network: PreTrainedModel, count: int) -> None:
    """Removes all layers after the first `count`; the final norm stays.

    Later layers specialise in predicting the next token (Shukor et al., "SmolVLA" (2025), use half of the layers).
    """
    layers = network.base_model.layers
    if count > len(layers):
        message, allowed = f"the language model has {len(layers)} layers", f"1..{len(layers)}"
        raise ConfigError([Problem("actor.model.backbone_layers", message, value=str(count), allowed=allowed)])
    del layers[count:]
    network.config.num_hidden_layers = count
    for name in _BY_LAYER:  # transformers refuses a config with more of them than layers
        if getattr(network.config, name, None):
            setattr(network.config, name, getattr(network.config, name)[:count])


def tasks_of_rows(tasks: Tensor | None, instructions: int, rows: Tensor) -> Tensor:
    """Returns the index of each row's instruction, [B] int64. tasks: it, or None with a single instruction."""
    if tasks is not None:
        return tasks
    assert instructions == 1, "a policy with several instructions needs the task of each row"
    return torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
