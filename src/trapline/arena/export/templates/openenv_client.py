"""The client of the environment."""

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import State
from trapline_env.models import TraplineAction, TraplineObservation


class TraplineEnv(EnvClient[TraplineAction, TraplineObservation, State]):
    def _step_payload(self, action: TraplineAction) -> dict[str, Any]:
        return {"reply": action.reply, "files": action.files}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[TraplineObservation]:
        done, reward = payload.get("done", False), payload.get("reward")
        seen = {**payload.get("observation", {}), "done": done, "reward": reward}
        observation = TraplineObservation.model_validate(seen)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(episode_id=payload.get("episode_id"), step_count=payload.get("step_count", 0))
