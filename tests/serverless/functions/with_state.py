"""Rewards that keep state: source text, and the line and words of each finding; and rewards with possibly harmless
state."""

STATEFUL = {
    "counter": (
        """
        CALLS = 0
        def reward(sample):
            global CALLS
            CALLS += 1
            return 1.0 / CALLS
        """,
        [(5, "counts in CALLS")],
    ),
    "running mean": (
        """
        MEAN = 0.0
        def reward(sample):
            global MEAN
            value = len(sample.completion)
            MEAN = 0.9 * MEAN + 0.1 * value
            return value - MEAN
        """,
        [(6, "writes the global MEAN")],
    ),
    "novelty against what was seen": (
        """
        SEEN = set()
        def reward(sample):
            if sample.completion in SEEN:
                return 0.0
            SEEN.add(sample.completion)
            return 1.0
        """,
        [(6, "changes SEEN (add)")],
    ),
    "a dict used as a set of what was seen": (
        """
        SEEN = {}
        def reward(sample):
            if sample.completion in SEEN:
                return 0.0
            SEEN[sample.completion] = True
            return 1.0
        """,
        [(6, "writes into SEEN")],
    ),
    "visit counts": (
        """
        from collections import Counter
        VISITS = Counter()
        def bonus(key):
            VISITS[key] += 1
            return VISITS[key] ** -0.5
        def reward(sample):
            return bonus(sample.completion)
        """,
        [(5, "counts in VISITS")],
    ),
    "history compared with": (
        """
        HISTORY = []
        def reward(sample):
            best = max(HISTORY, default=0.0)
            HISTORY.append(len(sample.completion))
            return HISTORY[-1] - best
        """,
        [(5, "changes HISTORY (append)")],
    ),
    "the first answer is remembered": (
        """
        FIRST = None
        def reward(sample):
            global FIRST
            if FIRST is None:
                FIRST = sample.completion
            return float(sample.completion == FIRST)
        """,
        [(6, "writes the global FIRST")],
    ),
    "attribute of a class": (
        """
        class Config:
            step = 0
        def reward(sample):
            Config.step += 1
            return 1.0 if Config.step < 100 else 0.5
        """,
        [(5, "counts in Config")],
    ),
    "attribute of the function": (
        """
        def reward(sample):
            reward.last = getattr(reward, "last", "")
            changed = reward.last != sample.completion
            reward.last = sample.completion
            return float(changed)
        """,
        [(3, "writes into reward"), (5, "writes into reward")],
    ),
    "mutable default": (
        """
        def reward(sample, seen=[]):
            seen.append(sample.completion)
            return float(len(seen))
        """,
        [(3, "changes seen (append)")],
    ),
    "iterator": (
        """
        import itertools
        TURN = itertools.count()
        def reward(sample):
            return float(next(TURN) % 2)
        """,
        [(5, "TURN is an iterator")],
    ),
    "object that counts": (
        """
        class reward:
            def __init__(self):
                self.calls = 0
            def __call__(self, sample):
                self.calls += 1
                return 1.0 / self.calls
        """,
        [(6, "counts in self.calls")],
    ),
    "object that remembers": (
        """
        class reward:
            def __init__(self):
                self.buffer = []
            def __call__(self, sample):
                self.remember(sample)
                return float(len(self.buffer))
            def remember(self, sample):
                self.buffer.append(sample.completion)
        """,
        [(9, "changes self.buffer (append)")],
    ),
    "object of the module that remembers": (
        """
        class Tracker:
            def __init__(self):
                self.last = ""
            def same(self, text):
                before = self.last
                self.last = text
                return before == text
        TRACKER = Tracker()
        def reward(sample):
            return 0.0 if TRACKER.same(sample.completion) else 1.0
        """,
        [(7, "sets self.last")],
    ),
    "closure with nonlocal": (
        """
        def make(decay):
            weight = 1.0
            def score(sample):
                nonlocal weight
                weight *= decay
                return weight
            return score
        reward = make(0.99)
        """,
        [(6, "counts in weight")],
    ),
    "closure over a list": (
        """
        def make():
            seen = []
            def score(sample):
                seen.append(sample.completion)
                return float(len(set(seen)))
            return score
        reward = make()
        """,
        [(5, "changes seen (append)")],
    ),
    "a file read back": (
        """
        import json, os
        def reward(sample):
            best = json.load(open("best.json")) if os.path.exists("best.json") else 0
            if len(sample.completion) > best:
                json.dump(len(sample.completion), open("best.json", "w"))
            return float(len(sample.completion) > best)
        """,
        [(6, "writes the file 'best.json'")],
    ),
    "a log read elsewhere": (
        """
        import pathlib
        LOG = pathlib.Path("answers.txt")
        def remember(text):
            with LOG.open("a") as f:
                f.write(text)
        def reward(sample):
            remember(sample.completion)
            return float(LOG.read_text().count(sample.completion))
        """,
        [(5, "writes the file LOG")],
    ),
    "a decorator that counts": (
        """
        def counted(function):
            calls = 0
            def wrapper(*args, **kwargs):
                nonlocal calls
                calls += 1
                return function(*args, **kwargs) / calls
            return wrapper
        @counted
        def reward(sample):
            return 1.0
        """,
        [(6, "counts in calls")],
    ),
    "environment as a parameter": (
        """
        def reward(sample, env):
            return env.success_rate()
        """,
        [(2, "parameter 'env' is an environment")],
    ),
    "environment by its type": (
        """
        def reward(world: "gymnasium.Env", action):
            return world.step(action)[1]
        """,
        [(2, "parameter 'world' is an environment")],
    ),
    "the environment variables as a store": (
        """
        import os
        def reward(sample):
            last = os.environ.get("LAST", "")
            os.environ["LAST"] = sample.completion
            return float(last == sample.completion)
        """,
        [(5, "writes into the module os")],
    ),
    "in a helper file": (
        """
        import counting
        def reward(sample):
            return counting.tick()
        """,
        [(4, "counts in TICKS")],
    ),
}

UNSURE = {
    "kept but never read": """
        LOG = []
        def reward(sample):
            LOG.append(sample.id)
            return 1.0
    """,
    "set anew in each call": """
        class reward:
            def __call__(self, sample):
                self.text = sample.completion.strip()
                return self.words() / 10
            def words(self):
                return len(self.text.split())
    """,
    "a method of an unknown object": """
        import prometheus_client
        SCORES = prometheus_client.Registry()
        def reward(sample):
            SCORES.update(sample.id)
            return 1.0
    """,
    "a database": """
        import sqlite3
        def reward(sample):
            with sqlite3.connect("log.db") as db:
                db.execute("INSERT INTO log VALUES (?)", (sample.id,))
            return 1.0
    """,
}
