"""Rewards without state, as people write them: source texts by their special feature."""

STATELESS = {
    "exact match": """
        def reward(sample):
            return float(sample.completion.strip() == sample.reference_answer)
    """,
    "gsm8k with compiled patterns": """
        import re
        ANSWER = re.compile(r"#### (-?[0-9.,]+)")
        UNITS = {"dollars", "miles"}

        def extract(text):
            found = ANSWER.findall(text)
            return found[-1].replace(",", "") if found else None

        def reward(data_source, solution_str, ground_truth, extra_info=None):
            words = [w for w in solution_str.split() if w not in UNITS]
            words.append("end")
            return 1.0 if extract(" ".join(words)) == ground_truth else 0.0
    """,
    "lru_cache": """
        import functools
        @functools.lru_cache(maxsize=4096)
        def normalise(text):
            return " ".join(text.split()).casefold()
        def reward(sample):
            return float(normalise(sample.completion) == normalise(sample.reference_answer))
    """,
    "model loaded at first use": """
        _MODEL = None
        def model():
            global _MODEL
            if _MODEL is None:
                from sentence_transformers import SentenceTransformer
                _MODEL = SentenceTransformer("all-MiniLM-L6-v2")
            return _MODEL
        def reward(sample):
            a, b = model().encode([sample.completion, sample.reference_answer])
            return float(a @ b)
    """,
    "model loaded behind an early return": """
        _MODEL = None
        def model():
            global _MODEL
            if _MODEL is not None:
                return _MODEL
            _MODEL = open("words.txt").read().split()
            return _MODEL
        def reward(sample):
            return len([w for w in sample.completion.split() if w in model()]) / 10
    """,
    "memo in a dict": """
        CACHE = {}
        def distance(a, b):
            key = (a, b)
            if key in CACHE:
                return CACHE[key]
            value = sum(x != y for x, y in zip(a, b))
            CACHE[key] = value
            return value
        def reward(sample):
            return -distance(sample.completion, sample.reference_answer)
    """,
    "bounded memo": """
        CACHE = {}
        def reward(sample):
            found = CACHE.get(sample.completion)
            if found is None:
                found = len(sample.completion.split())
                if len(CACHE) > 1000:
                    CACHE.clear()
                CACHE[sample.completion] = found
            return found
    """,
    "class with load": """
        import pathlib
        class reward:
            def __init__(self):
                self.table = {}
            def load(self, artefacts: pathlib.Path):
                for line in (artefacts / "table.txt").read_text().splitlines():
                    self.table[line] = 1.0
            def __call__(self, sample):
                words = sample.completion.split()
                return sum(self.score(w) for w in words)
            def score(self, word):
                return self.table.get(word, 0.0)
    """,
    "class with a lazy client": """
        class reward:
            def __init__(self):
                self.client = None
            async def __call__(self, sample):
                if self.client is None:
                    import httpx
                    self.client = httpx.AsyncClient()
                answer = await self.client.post("http://judge", json={"text": sample.completion})
                return answer.json()["score"]
    """,
    "objects made in the call": """
        class Parser:
            def __init__(self):
                self.stack = []
            def feed(self, text):
                for c in text:
                    self.depth = len(self.stack)
                    self.stack.append(c)
                return self.stack
        def reward(sample):
            parser = Parser()
            return float(len(parser.feed(sample.completion)) > 3)
    """,
    "locals that shadow globals": """
        scores = {}
        def reward(prompts, completions, **columns):
            scores = []
            for c in completions:
                scores.append(float(len(c)))
            return scores
    """,
    "nested helper with nonlocal": """
        def reward(sample):
            count = 0
            def visit(node):
                nonlocal count
                count += 1
                for child in node:
                    visit(child)
            visit(sample.metadata["tree"])
            return count
    """,
    "scratch file": """
        import subprocess, tempfile, pathlib
        def reward(sample):
            with tempfile.TemporaryDirectory() as d:
                path = pathlib.Path(d) / "main.py"
                path.write_text(sample.completion)
                done = subprocess.run(["python", str(path)], capture_output=True)
                (pathlib.Path(d) / "out").write_bytes(done.stdout)
                return float((pathlib.Path(d) / "out").read_text() == sample.reference_answer)
    """,
    "fixed scratch file, written before it is read": """
        def reward(sample):
            with open("/tmp/solution.txt", "w") as f:
                f.write(sample.completion)
            with open("/tmp/solution.txt") as f:
                return float(len(f.read()))
    """,
    "a word list that is read": """
        with open("words.txt") as f:
            WORDS = set(f.read().split())
        BAD = []
        for word in sorted(WORDS):
            BAD.append(word[::-1])
        def reward(sample):
            return sum(w in WORDS and w not in BAD for w in sample.completion.split())
    """,
    "settings of libraries": """
        import os, torch, logging
        log = logging.getLogger(__name__)
        def reward(sample):
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            torch.backends.cudnn.deterministic = True
            log.info("scoring %s", sample.id)
            return float(torch.add(torch.tensor(1.0), 1.0))
    """,
    "hash and heap of the call": """
        import hashlib, heapq
        def reward(sample):
            digest = hashlib.sha256()
            digest.update(sample.completion.encode())
            heap = []
            for w in sample.completion.split():
                heapq.heappush(heap, len(w))
            return heapq.heappop(heap) if heap else 0.0
    """,
    "semaphore around a judge": """
        import asyncio
        LIMIT = asyncio.Semaphore(8)
        async def reward(args, sample, **kwargs):
            async with LIMIT:
                await asyncio.sleep(0)
            return 1.0 if sample.response else 0.0
    """,
    "a factory over constants": """
        def make(weight, words):
            allowed = frozenset(words)
            def score(sample):
                hits = [w for w in sample.completion.split() if w in allowed]
                return weight * len(hits)
            return score
        reward = make(0.5, ["a", "b"])
    """,
    "verifiers rubric function": """
        async def reward(completion, answer, state, parser, **kwargs):
            state["checked"] = True
            parsed = parser.parse_answer(completion) or ""
            return 1.0 if parsed.strip() == answer else 0.0
    """,
    "default arguments that are read": """
        def reward(sample, weights={"format": 0.1, "answer": 0.9}):
            total = dict(weights)
            total["format"] *= "<answer>" in sample.completion
            return sum(total.values())
    """,
    "a registry filled at import": """
        REGISTRY = {}
        def register(name):
            def decorate(function):
                REGISTRY[name] = function
                return function
            return decorate
        @register("math")
        def reward(sample, log=[]):
            return float("math" in REGISTRY)
    """,
    "a decorator that catches": """
        import functools
        def safe(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                try:
                    return function(*args, **kwargs)
                except KeyError:
                    return 0.0
            return wrapper
        @safe
        def reward(sample):
            return {"4": 1.0}[sample.completion]
    """,
    "unused stateful neighbour": """
        COUNT = 0
        def debug(sample):
            global COUNT
            COUNT += 1
        def reward(sample):
            return 1.0
    """,
}
