"""Trapline challenges as a resources server of NeMo Gym; answers are graded in a local sandbox."""

from nemo_gym.base_resources_server import (
    BaseMultiRewardVerifyResponse,
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    SimpleResourcesServer,
)
from pydantic import BaseModel

from trapline.arena.errors import ArenaError
from trapline.arena.export.environment import RewardKind, files_of_reply, grade_answer

#: The components that every task has; the measured ones of `grade` are left out.
COMPONENTS = ("correctness", "traps", "robustness")


class TraplineConfig(BaseResourcesServerConfig):
    #: quick: cases and findings, in seconds; grade: with measurements and the answer's own tests.
    trapline_reward: RewardKind = "quick"


class VerifierMetadata(BaseModel):
    challenge: str


class TraplineVerifyRequest(BaseVerifyRequest):
    verifier_metadata: VerifierMetadata


class TraplineVerifyResponse(BaseMultiRewardVerifyResponse):
    state: str = ""
    findings: list[str] = []
    grading_seconds: float = 0.0


class TraplineResourcesServer(SimpleResourcesServer):
    config: TraplineConfig

    async def verify(self, body: TraplineVerifyRequest) -> TraplineVerifyResponse:
        files = files_of_reply(body.response.output_text)
        asked = body.model_dump()
        try:
            graded = await grade_answer(
                body.verifier_metadata.challenge, files, self.config.trapline_reward
            )
        except ArenaError as error:  # the machine cannot judge: no valid measurement
            return TraplineVerifyResponse(
                **asked,
                reward=0.0,
                reward_components=dict.fromkeys(COMPONENTS, 0.0),
                mask_sample=True,
                failure_reason=str(error),
            )
        return TraplineVerifyResponse(
            **asked,
            reward=graded.reward,
            reward_components={name: graded.dimensions.get(name, 0.0) for name in COMPONENTS},
            state=graded.state,
            findings=graded.findings,
            grading_seconds=graded.seconds,
        )


if __name__ == "__main__":
    TraplineResourcesServer.run_webserver()
