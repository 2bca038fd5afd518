"""Many prompts through one engine, to the end: for evaluation and library use.

Knows the engine's contract; does not know what the samples are for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from asynctensorrlhf.interfaces import RolloutEngine
from asynctensorrlhf.types import GenerationRequest, Prompt, Sample


def complete(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    *,
    num_samples: int = 1,
    between_steps: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """`num_samples` completions of each prompt, ordered by prompt and sample index.

    Args:
        engine: idle; it is idle again afterwards.
        prompts: with different group ids.
        num_samples: per prompt.
        between_steps: called between two steps of the engine; may raise to stop.
    """
    waiting = deque(prompts)
    samples: list[Sample] = []
    while waiting or not engine.is_idle():
        between_steps()
        while waiting and engine.has_room():
            engine.add(GenerationRequest(waiting.popleft(), num_samples))
        samples += engine.step()
    place = {prompt.group_id: index for index, prompt in enumerate(prompts)}
    return sorted(samples, key=lambda sample: (place[sample.prompt.group_id], sample.sample_index))
