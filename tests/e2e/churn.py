"""What a server is asked over a while: a seeded sequence of requests, the same for every Engine."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

GROUPS = 28
LENGTHS = (5, 30, 100, 400, 1200)
NEW_TOKENS = (16, 40, 90)
SHARING = 0.6  # of the prompts begin as one of the last RECENT did
RECENT = 8
ABORTED = 0.3  # of the groups lose a request
PAUSED = 0.3  # of the groups are followed by a pause


@dataclass(frozen=True)
class Group:
    """Requests that are sent together; number `victim`, where there is one, is aborted."""

    prompts: list[list[int]]
    new_tokens: int
    victim: int | None
    pause_s: float


def groups(vocabulary: int) -> Iterator[Group]:
    draw = random.Random(5)
    earlier: list[list[int]] = []
    for _ in range(GROUPS):
        prompts = []
        for _ in range(draw.randint(1, 4)):
            ids = draw.choices(range(vocabulary), k=draw.choice(LENGTHS))
            if earlier and draw.random() < SHARING:
                old = draw.choice(earlier[-RECENT:])
                ids = old[: draw.randint(len(old) // 2, len(old))] + ids[:60]
            prompts.append(ids)
        earlier += prompts
        loses_one = len(prompts) > 1 and draw.random() < ABORTED
        victim = draw.randrange(len(prompts)) if loses_one else None
        pause_s = 1.0 if draw.random() < PAUSED else 0.0
        yield Group(prompts, draw.choice(NEW_TOKENS), victim, pause_s)
