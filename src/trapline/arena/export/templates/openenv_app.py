"""The environment over HTTP and WebSocket: `uvicorn server.app:app --port 8000`."""

import uvicorn
from openenv.core.env_server.http_server import create_app

try:
    from trapline_env.models import TraplineAction, TraplineObservation
    from trapline_env.server.trapline_environment import TraplineEnvironment
except ImportError:  # started from inside the folder, as the Dockerfile does
    from models import TraplineAction, TraplineObservation
    from server.trapline_environment import TraplineEnvironment

app = create_app(
    TraplineEnvironment,
    TraplineAction,
    TraplineObservation,
    env_name="trapline_env",
    max_concurrent_envs=256,
)


def main() -> None:
    uvicorn.run(app, host="127.0.0.1", port=8000)


if __name__ == "__main__":
    main()
