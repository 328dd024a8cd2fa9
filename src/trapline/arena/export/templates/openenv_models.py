"""What goes in and out of the environment."""

from openenv.core.env_server.types import Action, Observation
from pydantic import Field


class TraplineAction(Action):
    """An answer: a reply with fenced files, or the files themselves."""

    reply: str = Field(default="", description="A reply with whole files in fenced code blocks")
    files: dict[str, str] = Field(default_factory=dict, description="Path → text of each file")


class TraplineObservation(Observation):
    """The task after a reset, the grade after a step."""

    challenge: str = Field(default="", description="The id of the challenge")
    prompt: str = Field(default="", description="What to write")
    system_prompt: str = Field(default="", description="How to answer")
    starter: dict[str, str] = Field(default_factory=dict, description="The files to start from")
    state: str = Field(default="", description="pass, fail, hack or no_answer")
    reason: str = Field(default="", description="Why, in one sentence")
    metrics: dict[str, float] = Field(default_factory=dict, description="Dimensions and seconds")
