"""The smallest configs of the two tasks, those of the fixture `folder`, and a text environment."""

REASONING = """\
runner:
  task_type: reasoning
  max_steps: 4
  output_dir: out
  logger_backends: []
cluster:
  component_placement:
    actor,critic,rollout,reward: all
data:
  task: {type: digits, params: {operation: last, length: 2}}
  train_size: 60
  val_size: 8
  train_batch_size: 8
  mini_batch_size: 4
  max_prompt_length: 8
  max_response_length: 3
  use_chat_template: false
algorithm:
  ppo_epochs: 2
actor:
  model:
    random_init: {hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 64, max_positions: 16}
    tokenizer: bytes
  optim: {lr: 1.0e-3}
critic:
  use_critic_model: true
  optim: {lr: 1.0e-3}
reward:
  num_workers: 1
"""

EMBODIED = """\
runner:
  task_type: embodied
  max_steps: 4
  output_dir: out
  logger_backends: []
cluster:
  component_placement:
    actor_critic,env,rollout: all
algorithm:
  loss_type: actor_critic
  gamma: 0.99
  ppo_epochs: 2
data:
  mini_batch_size: 16
actor:
  model: {hidden_sizes: [16, 16]}
  optim: {lr: 1.0e-3}
env:
  id: CartPole-v1
  num_envs: 4
  rollout_steps: 16
  evaluation: {episodes: 2}
"""

# A text environment of two turns and a tool, for a file of Python beside a config.
GAME = """
class Game:
    def __init__(self, params): ...

    def reset(self, question, seed):
        self.turns, self.seed = 0, seed
        return f"{seed % 10}:"

    def step(self, text):
        self.turns += 1
        return "<more>", len(text) + self.seed % 7 / 10, self.turns == 2

class Echo:
    schema = {"name": "echo", "description": "Repeats.", "parameters": {"type": "object"}}

    def __init__(self, question, params): ...

    def call(self, arguments):
        return "again"
"""

# Two calls; the reward is larger for ASCII.
OPENAI_AGENT = """
from functools import cache
from openai import AsyncOpenAI

@cache
def client(base_url):
    return AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0)

async def solve(question, base_url, api_key):
    policy = client(base_url).with_options(api_key=api_key)
    messages = [{"role": "user", "content": question["text"]}]
    reward = 0.0
    for _ in range(2):
        answer = await policy.chat.completions.create(model="policy", messages=messages, max_tokens=2)
        text = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "+"}]
        reward += len(text) + text.isascii()
    return reward
"""
