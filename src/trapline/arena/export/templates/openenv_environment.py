"""One challenge an episode, one answer a step; graded by Trapline in a local sandbox."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

from trapline.arena.export.environment import files_of_reply, grade_answer

try:
    from trapline_env.models import TraplineAction, TraplineObservation
except ImportError:  # started from inside the folder, as the Dockerfile does
    from models import TraplineAction, TraplineObservation

ROWS = json.loads((Path(__file__).parents[1] / "tasks.json").read_text(encoding="utf-8"))


class TraplineEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._row: dict[str, Any] = ROWS[0]
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> TraplineObservation:
        """Starts the challenge that the option `challenge` names, or a random one."""
        named = options.get("challenge")
        known = {row["challenge"]: row for row in ROWS}
        if named is not None and named not in known:
            raise ValueError(
                f"unknown challenge {named!r}; this environment has {', '.join(known)}"
            )
        self._row = known[named] if named else random.Random(seed).choice(ROWS)
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        shown = ("challenge", "prompt", "system_prompt", "starter")
        return TraplineObservation(
            **{name: self._row[name] for name in shown}, done=False, reward=None
        )

    def step(
        self, action: TraplineAction, timeout_s: float | None = None, **options: Any
    ) -> TraplineObservation:
        return asyncio.run(self.step_async(action, timeout_s, **options))

    async def step_async(
        self,
        action: TraplineAction,
        timeout_s: float | None = None,
        **_: Any,
    ) -> TraplineObservation:
        """Grades the answer and ends the episode."""
        self._state.step_count += 1
        files = action.files or files_of_reply(action.reply)
        graded = await asyncio.wait_for(grade_answer(self._row["challenge"], files), timeout_s)
        return TraplineObservation(
            challenge=self._row["challenge"],
            state=graded.state,
            reason=graded.reason,
            metrics={**graded.metrics(), "reward_noise": self._row["noise"]["quick"]},
            reward=graded.reward,
            done=True,
        )

    @property
    def state(self) -> State:
        return self._state
