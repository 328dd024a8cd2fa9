"""Level `process`: a child with rlimits and a clean environment; it can read what we can."""

from trapline.arena.process.isolation.limits import environment, rlimits
from trapline.arena.process.isolation.plan import Command, SandboxPlan, start_inside
from trapline.arena.process.isolation.spec import Launch
from trapline.arena.process.isolation.stage import SandboxStage


def command(launch: Launch, stage: SandboxStage) -> Command:
    plan = SandboxPlan(
        program=str(stage.program),
        site=str(stage.site(launch.packages)),
        rlimits={} if "rlimits" in launch.without else rlimits(launch.limits, launch.gpu),
        supervise=True,
    )
    arguments = start_inside(plan, str(stage.inside), launch, str(stage.submission))
    return Command(arguments, environment(str(stage.scratch), launch.gpu))
