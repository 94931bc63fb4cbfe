"""An OpenEnv server of a small game, run by an interpreter that has `openenv`: `openenv_server.py PORT`.

Which of four letters follows the one that is shown? Two tries. Says its port once it listens (0: a free one)."""

import socket
import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

LETTERS = ["b", "c", "d", "e"]


class Say(Action):
    letter: str


class Seen(Observation):
    text: str = ""
    letters: list[str] = LETTERS


class Letters(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.shown, self.turns, self.episode_id = (seed or 0) % len(LETTERS), 0, episode_id
        return self.seen()

    def step(self, action, timeout_s=None, **more):
        self.turns += 1
        right = action.letter == LETTERS[self.shown]
        return self.seen(done=right or self.turns == 2, reward=float(right))

    def seen(self, **more):
        return Seen(text=f"<spell> {'abcd'[self.shown]} =", **more)

    @property
    def state(self):
        return State(episode_id=self.episode_id, step_count=self.turns)


def main() -> None:
    app = create_app(Letters, Say, Seen, max_concurrent_envs=256)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", int(sys.argv[1])))
    listening.listen(256)
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main()
