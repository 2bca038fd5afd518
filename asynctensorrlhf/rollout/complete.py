"""Many requests through one engine, to the end: for evaluation and library use.

Knows the engine's contract; does not know what the samples are for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from asynctensorrlhf.interfaces import RolloutEngine
from asynctensorrlhf.types import GenerationRequest, Sample


def complete(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    *,
    between_steps: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """All samples of all requests, ordered by request and sample index.

    Args:
        engine: idle again afterwards; samples that an earlier call left in it when it failed are discarded.
        requests: with different group ids.
        between_steps: called between two steps of the engine; may raise to stop.
    """
    waiting = deque(requests)
    place = {request.prompt.group_id: index for index, request in enumerate(requests)}
    samples: list[Sample] = []
    while waiting or not engine.is_idle():
        between_steps()
        while waiting and engine.has_room():
            engine.add(waiting.popleft())
        samples += [sample for sample in engine.step() if sample.prompt.group_id in place]
    return sorted(samples, key=lambda sample: (place[sample.prompt.group_id], sample.sample_index))
