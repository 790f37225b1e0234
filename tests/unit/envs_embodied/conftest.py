"""Small environments with known behaviour, in a module that worker processes can import too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.vector import VectorEnv

TOYS = '''
import os, random, time
from collections import deque
import gymnasium, numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Tuple


class Toy(gymnasium.Env):
    """Observes (number of the episode, step in it); the reward is the first action it received. Faults come at `at` of
    environment `which` (known by the seed modulo 100)."""

    metadata = {"render_modes": []}
    observation_space = Box(-np.inf, np.inf, (1, 2), np.float64)
    action_space = Box(-1.0, 1.0, (2, 1), np.float32)

    def __init__(self, fault="", which=0, at=3, terminate_at=0):
        self.fault, self.which, self.at, self.terminate_at = fault, which, at, terminate_at
        self.episode, self.number = 0, -1

    def observe(self):
        return np.array([[self.episode, self.step_count]], float)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.number = seed % 100
        self.episode += 1
        self.step_count = 0
        return self.observe(), {}

    def step(self, action):
        assert action.shape == (2, 1) and action.dtype == np.float32
        self.step_count += 1
        observation, reward = self.observe(), float(action[0, 0])
        if self.fault and self.number == self.which and self.step_count == self.at:
            if self.fault == "raise":
                raise RuntimeError("the arm fell off")
            if self.fault == "hang":
                time.sleep(1000)
            if self.fault == "die":
                os.kill(os.getpid(), 9)
            if self.fault == "nan reward":
                reward = float("nan")
            if self.fault == "inf observation":
                observation[0, 1] = np.inf
        return observation, reward, self.step_count == self.terminate_at, False, {}


class Drawing(Toy):
    """Observes numbers of Python's own generator."""

    def reset(self, *, seed=None, options=None):
        self.generator = random.Random(seed)
        return super().reset(seed=seed, options=options)

    def observe(self):
        return np.array([[self.generator.random(), self.generator.gauss(0, 1)]])


class Started(Toy):
    observation_space = Box(0, 255, (2,), np.uint8)
    action_space = Discrete(3, start=5)

    def observe(self):
        return np.array([self.episode, self.step_count], np.uint8)

    def step(self, action):
        self.step_count += 1
        return self.observe(), float(action), False, False, {}


class Flaky(Toy):
    """A random walk that raises with probability `p` in environments of odd number, and writes down that it did."""

    def __init__(self, p=0.0, log=""):
        super().__init__()
        self.p, self.log, self.faults = p, log, None

    def reset(self, *, seed=None, options=None):
        first = super().reset(seed=seed)
        if seed is not None:
            self.faults = np.random.default_rng(seed)
        return first

    def observe(self):
        return np.array([[self.episode, self.np_random.normal()]], float)

    def step(self, action):
        if self.number % 2 and self.faults.random() < self.p:
            with open(self.log, "a") as file:
                print(self.number, file=file)
            raise RuntimeError("a cable broke")
        observation, _, *ends = super().step(action)
        return observation, float(observation[0, 1]), *ends


class Planned(Toy):
    """Raises in the calls of `step` in `plan`, and observes what is not finite in the calls of `reset` in `lost`; all
    environments of one `tag` in a process are counted."""

    calls, resets = {}, {}

    def __init__(self, plan=(), lost=(), tag=""):
        super().__init__()
        self.plan, self.lost, self.tag = plan, lost, tag

    def reset(self, *, seed=None, options=None):
        self.resets[self.tag] = call = self.resets.get(self.tag, 0) + 1
        observation, info = super().reset(seed=seed)
        if call in self.lost:
            observation[0, 1] = np.nan if call % 2 else -np.inf
        return observation, info

    def step(self, action):
        self.calls[self.tag] = call = self.calls.get(self.tag, 0) + 1
        if call in self.plan:
            raise self.error(call)
        return super().step(action)

    def error(self, call):
        return RuntimeError(f"bug in call {call}")


class Mute(Planned):
    """Raises an error without a text."""

    class Raised(ValueError):
        def __str__(self):
            return self.text

    def error(self, call):
        return self.Raised()


class BadReset(Toy):
    """Raises when its second episode begins, if its seed is small, as those of replacements are not."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.fine = seed > 1000
        if self.episode == 1 and not self.fine:
            raise RuntimeError("the arm does not come back")
        return super().reset(seed=seed)


class Unsavable(Toy):
    def __init__(self):
        super().__init__()
        self.handle = (value for value in ())  # generators cannot be pickled


class Holder(gymnasium.Env):
    """Holds another environment, or a deque as a simulator, in the attribute `env`."""

    def __init__(self, inner=""):
        if inner == "a deque":
            self.env = deque([0.0])
            self.observation_space, self.action_space = Box(-np.inf, np.inf, (1,)), Discrete(2)
        else:
            self.env = gymnasium.make(inner)
            self.observation_space, self.action_space = self.env.observation_space, self.env.action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if isinstance(self.env, gymnasium.Env):
            return self.env.reset(seed=seed)
        self.env[0] = self.np_random.normal()
        return np.array(self.env), {}

    def step(self, action):
        if isinstance(self.env, gymnasium.Env):
            return self.env.step(action)
        self.env[0] += 1 + action
        return np.array(self.env), self.env[0], False, False, {}


class Views(gymnasium.Env):
    """A cart whose position and speed are views of its state, or of MuJoCo's data; steps are counted in a slot."""

    __slots__ = ("count",)
    observation_space, action_space = Box(-np.inf, np.inf, (4,)), Box(-1.0, 1.0, (2,))

    def __init__(self, memory="array"):
        if memory == "array":
            self.state = np.zeros((2, 2), order="F")
        elif memory == "parts":
            self.state = np.zeros(9)[1:5].reshape(2, 2)  # of an array that it does not hold
        else:
            import mujoco

            body = '<body><joint type="slide"/><joint type="slide" axis="1 0 0"/><geom size="1"/></body>'
            self.model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{body * 2}</worldbody></mujoco>")
            self.data = mujoco.MjData(self.model)
            self.state = self.data.qpos.reshape(2, 2)
        self.position, self.speed = self.state[0], self.state[1, ::-1]

    def observe(self):
        return np.append(self.state[0], [self.state[1, 0], self.count]).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        self.state[:] = self.np_random.normal(size=(2, 2))
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        self.speed += action
        self.position += self.speed
        return self.observe(), 0.0, False, False, {}


class Unclosable(Toy):
    """Its close() raises, if it was stepped with `used`; of two at the same time the second one waits."""

    def __init__(self, which=0, used=""):
        super().__init__(which=which)
        self.used, self.stepped = used, False

    def step(self, action):
        self.stepped = True
        return super().step(action)

    def close(self):
        if self.used and not self.stepped:
            return
        if self.used:
            try:
                os.mkdir(self.used)
            except FileExistsError:
                time.sleep(0.5)
        raise RuntimeError(f"the viewer of {self.which} is gone")


class Route(Toy):
    """Visits the places of a list in turn, and observes the present one."""

    def __init__(self, places):
        super().__init__()
        self.places = places

    def reset(self, **options):
        self.places.append(self.places.pop(0))
        return super().reset(**options)

    def observe(self):
        return np.array([[self.places[0], self.step_count]], float)


class Pictures(Toy):
    """Draws pictures of this type and shape; the second one has another height."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, dtype="uint8", shape=(32, 32, 3), render_mode=None):
        super().__init__()
        self.picture = np.zeros(shape, dtype)

    def render(self):
        picture, self.picture = self.picture, self.picture[1:]
        return picture


class OtherShape(Toy):
    def observe(self):
        return super().observe()[0, :1]


class OtherStep(Toy):
    def step(self, action):
        observation, *rest = super().step(action)
        return observation[0, :1], *rest


class Double(Toy):
    """Refuses actions that are not of its space, whose bounds are of float64."""

    action_space = Box(np.array([-0.3, -0.7]), np.array([0.1, 0.7]), dtype=np.float64)

    def step(self, action):
        assert self.action_space.contains(action), repr(action)
        self.step_count += 1
        return self.observe(), float(action[0]), False, False, {}


class Half(Double):
    action_space = Box(np.float16(-0.3), np.float16(0.7), (2,), np.float16)


class WholeActions(Toy):
    action_space = Box(0, 3, (2, 1), np.int64)


class OddSpaces(Toy):
    observation_space = Sequence(Discrete(2))
    action_space = Tuple([Discrete(2), Discrete(2)])


class Goals(Toy):
    """Says `says[t]` in step t of every episode (None: nothing) and observes a dictionary."""

    observation_space = Dict(
        {"observation": Box(-9, 9, (1, 2)), "desired_goal": Box(0, 1, (1,)), "achieved_goal": Discrete(3)}
    )

    def __init__(self, says=(), key="success"):
        super().__init__()
        self.says, self.key = says, key

    def observe(self):
        seen = np.array([[self.episode, self.step_count]], np.float32)
        return {"observation": seen, "desired_goal": np.array([0.5], np.float32), "achieved_goal": self.step_count % 3}

    def step(self, action):
        *result, info = super().step(action)
        said = self.says[self.step_count - 1]
        return (*result, info if said is None else {self.key: np.float32(said)})


class Choices(Toy):
    """Rewards a step with the choices as digits; refuses actions that are not of its space."""

    def __init__(self, binary=False):
        super().__init__()
        self.action_space = MultiBinary([2, 2]) if binary else MultiDiscrete([2, 3], start=[5, 0])

    def step(self, action):
        assert self.action_space.contains(action), repr(action)
        assert action.dtype == self.action_space.dtype
        observation, _, *rest = super().step(np.zeros((2, 1), np.float32))
        return (observation, float("".join(map(str, action.reshape(-1).tolist()))), *rest)


class Pictured(Goals):
    observation_space = Dict({"camera": Box(0, 255, (8, 8, 3), np.uint8), "arm": Dict({"angle": Box(-1, 1, (2,))})})


class OwnSeed(Toy):
    """Seeded by the older method alone."""

    def seed(self, seed):
        self.own = np.random.default_rng(seed)

    def reset(self, *, seed=None, options=None):
        _, info = super().reset()
        return self.own.normal(size=(1, 2)).astype(np.float32), info


for name in (
    "Toy", "Started", "Flaky", "BadReset", "Unsavable", "OddSpaces", "OtherShape", "OtherStep", "WholeActions", "Goals",
    "OwnSeed", "Choices", "Pictured", "Drawing", "Planned", "Mute", "Holder", "Double", "Half",
    "Views", "Pictures", "Route", "Unclosable",
):
    gymnasium.register(f"{name}-v0", entry_point=f"{__name__}:{name}", max_episode_steps=5)
'''


@pytest.fixture(scope="session", autouse=True)
def _toy_module(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("toys")
    (folder / "toy_envs.py").write_text(TOYS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


@pytest.fixture(autouse=True)
def _scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log into the current folder


@pytest.fixture
def make() -> Iterator[Callable[..., VectorEnv]]:
    """make("CartPole-v1", 2, 0, {"sutton_barto_reward": True}, restarts=1): environments, closed (twice) at the end."""
    made: list[VectorEnv] = []

    def build(
        env: str | EnvDescription, num_envs: int, num_workers: int = 0, kwargs: dict | None = None, **options: object
    ) -> VectorEnv:
        description = EnvDescription(env, kwargs or {}) if isinstance(env, str) else env
        made.append(VectorEnv(description, num_envs, num_workers, **options))
        return made[-1]

    yield build
    for envs in made:
        envs.close()
        envs.close()
