"""A real OpenEnv server of a small game, run by an interpreter that has `openenv`: `openenv_server.py SESSIONS`.

Says `PORT` on stdout once it listens."""

import socket
import sys
import threading

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Seen(Observation):
    text: str = ""


class Numbers(Environment):
    """Guess the seed's number below 8 within four turns. 99 breaks the game, 98 never returns."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, split="train", **more):
        if split == "broken":
            raise RuntimeError("no such split")
        self.secret, self.turns, self.episode_id = (seed or 0) % 8, 0, episode_id
        return Seen(text=f"{split}: guess 0 to 7")

    def step(self, action, timeout_s=None, **more):
        self.turns += 1
        if action.guess == 99:
            raise RuntimeError("the game broke")
        if action.guess == 98:
            threading.Event().wait()
        if action.guess == self.secret:
            return Seen(text="yes", done=True, reward=1.0, metadata={"success": True})
        return Seen(text="no", done=self.turns == 4, reward=0.0)

    @property
    def state(self):
        return State(episode_id=self.episode_id, step_count=self.turns)


def main() -> None:
    app = create_app(Numbers, Guess, Seen, max_concurrent_envs=int(sys.argv[1]))
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main()
