"""A rollout engine in forty lines: one response after the other, without a cache."""

import torch
from transformers import AutoModelForCausalLM

from rl_platform.engines.rollout.base import Completion, EngineSetup
from rl_platform.models.language import LanguageModel
from rl_platform.records import WeightsReceived


class Plain:
    def __init__(self, setup: EngineSetup) -> None:
        network = AutoModelForCausalLM.from_config(setup.model_config)
        self.model = LanguageModel(network).to(setup.device, setup.dtype).eval()
        network.set_attn_implementation("eager")  # LanguageModel has set that of packed sequences
        self.network, self.setup, self.version, self.stopped = network, setup, -1, False

    def receive(self, weights):
        self.model.load_state_dict(weights.state)
        self.version = weights.version
        return WeightsReceived(weights.version, weights.bytes, weights.buckets)

    @torch.inference_mode()
    def generate(self, requests, sampling, on_finished):
        self.stopped = False
        for request in requests:
            on_finished(self.respond(request, sampling))

    def respond(self, request, sampling) -> Completion:
        generator = torch.Generator(self.setup.device).manual_seed(request.seed)
        tokens, log_probs, reason = [], [], "length"
        for _ in range(request.limit(sampling)):
            if self.stopped:
                reason = "abort"
                break
            seen = torch.tensor([[*request.token_ids, *tokens]], device=self.setup.device)
            logits = self.network(input_ids=seen).logits[0, -1].float() / (sampling.temperature or 1.0)
            probs = logits.softmax(-1)
            greedy = sampling.temperature == 0
            token = int(probs.argmax() if greedy else torch.multinomial(probs, 1, generator=generator))
            tokens.append(token)
            log_probs.append(float(probs[token].log()))
            if token in self.setup.eos:
                reason = "stop"
                break
        return Completion(request.index, tuple(tokens), tuple(log_probs), reason)

    def abort(self):
        self.stopped = True

    def offload(self): ...

    def close(self): ...
