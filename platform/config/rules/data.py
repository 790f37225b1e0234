"""Rules of `data`: the task, and the sizes of batches."""

from __future__ import annotations

from rl_platform.config.rules.rule import CHUNKS, TASK, Condition, Rule, embodied, only, reasoning
from rl_platform.config.schema import Config

_KIND = "data.task.type"
_PROMPTS = (
    "task",
    "train_size",
    "val_size",
    "train_batch_size",
    "max_prompt_length",
    "max_response_length",
    "system_prompt",
    "prompt_template",
    "use_chat_template",
    "shuffle",
)


def rows_of_step(config: Config) -> int:
    """Rows of a rollout: sequences, or transitions of an embodied run."""
    return config.transitions if embodied(config) else config.data.train_batch_size * config.algorithm.group_size


def _task_is(*kinds: str) -> Condition:
    return lambda config: config.data.task is not None and config.data.task.type in kinds


def _transitions_left_over(config: Config) -> str:
    sizes = "env.num_envs * env.rollout_steps" + (f" / {CHUNKS}" if config.actor.model.num_action_chunks > 1 else "")
    return (
        f"mini-batches of {config.data.mini_batch_size} do not divide the {rows_of_step(config)} transitions of {sizes}"
    )


REFUSED = (
    Rule(
        "data.mini_batch_size",
        lambda config: embodied(config) and rows_of_step(config) % config.data.mini_batch_size,
        _transitions_left_over,
        ("env.num_envs", "env.rollout_steps", CHUNKS, TASK),
    ),
    *only(
        reasoning,
        Rule(
            "data.mini_batch_size",
            lambda config: rows_of_step(config) % config.data.mini_batch_size,
            lambda config: (
                f"mini-batches of {config.data.mini_batch_size} do not divide the {rows_of_step(config)} sequences of "
                "a step"
            ),
            ("data.train_batch_size", "algorithm.group_size", TASK),
            "a step has data.train_batch_size * algorithm.group_size sequences",
        ),
        Rule(
            "data.task",
            lambda config: config.data.task is None,
            "reasoning needs a task: where prompts and answers come from",
            (TASK,),
            "as data.task: {type: digits}",
        ),
        Rule(
            "data.task.path",
            lambda config: (task := config.data.task) is not None and task.type == "jsonl" and not task.path,
            "type jsonl needs the file to read",
            (_KIND, TASK),
        ),
        Rule(
            "data.task.name",
            lambda config: (task := config.data.task) is not None and task.type == "reasoning_gym" and not task.name,
            "type reasoning_gym needs the name of its data set",
            (_KIND, TASK),
            "as chain_sum",
        ),
        Rule(
            "data.task.params",
            lambda config: (
                (task := config.data.task) is not None
                and task.type == "digits"
                and task.params.get("operation") == "quotient"
                and config.rollout.multi_turn is None
            ),
            "quotient is scored after a turn that asks the calculator, and rollout.multi_turn is null",
            ("rollout.multi_turn", _KIND),
            "rollout.multi_turn: {tool: calculator}",
        ),
        Rule(
            "data.prompt_template",
            lambda config: "{question}" not in config.data.prompt_template,
            "without {question} all prompts would be the same",
            (TASK,),
        ),
    ),
)

WITHOUT_EFFECT = (
    *(Rule(f"data.{name}", embodied, "embodied training has no prompts", (TASK,)) for name in _PROMPTS),
    *only(
        reasoning,
        Rule(
            "data.task.name",
            _task_is("jsonl", "digits"),
            "it belongs to data.task.type reasoning_gym",
            (_KIND,),
        ),
        Rule("data.task.params", _task_is("jsonl"), "it belongs to generated tasks", (_KIND,)),
        *(
            Rule(
                f"data.task.{name}",
                _task_is("reasoning_gym", "digits"),
                "it belongs to data.task.type jsonl",
                (_KIND,),
            )
            for name in ("path", "val_path", "prompt_column", "answer_column")
        ),
        Rule(
            "data.train_size",
            _task_is("jsonl"),
            "a file has the size it has; only generated tasks are sized",
            (_KIND,),
        ),
        Rule(
            "data.system_prompt",
            lambda config: not config.data.use_chat_template,
            "without data.use_chat_template there is no system turn",
            ("data.use_chat_template",),
        ),
    ),
)
