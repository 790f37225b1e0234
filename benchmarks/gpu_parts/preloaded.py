"""Imports the modules that most parts use, so that forked processes need not import them. None initialises CUDA."""

import accelerate  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import rl_platform.launch.session  # noqa: F401
