"""Prompts made by reasoning-gym."""

from __future__ import annotations

import difflib
from itertools import islice

from otb_megatron.config import SourceConfig
from otb_megatron.types import Prompt, UserError

DATA_SOURCE_PREFIX = "reasoning_gym/"


def gym_prompts(source: SourceConfig) -> list[Prompt]:
    """The entries of a reasoning-gym task, not yet tokenised.

    Unless set, `seed` is 0 (reasoning-gym itself would draw one, and a resumed run would see other prompts) and `size` is
    `num_rows`. `extra_info` carries what the task's own `score_answer` reads: the entry's metadata and the task's options.

    Raises:
        UserError: unknown task (nearest name suggested) or options that the task refuses.
    """
    import reasoning_gym  # takes seconds to import, and only this kind of source needs it
    from reasoning_gym.factory import DATASETS

    name = source.reasoning_gym
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(DATASETS))}"
        raise UserError(f"reasoning_gym={name!r}: reasoning-gym has no such task; {hint}")
    options = {"seed": 0, **({"size": source.num_rows} if source.num_rows else {}), **source.reasoning_gym_options}
    try:
        dataset = reasoning_gym.create_dataset(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"reasoning_gym={name!r}: the task does not take reasoning_gym_options={source.reasoning_gym_options}: {error}") from error
    return [
        Prompt(
            id=number,
            data_source=DATA_SOURCE_PREFIX + name,
            messages=({"role": "user", "content": entry["question"]},),
            token_ids=(),
            ground_truth=entry["answer"],  # None for the few tasks with many right answers; their score_answer reads the metadata
            extra_info={"metadata": entry["metadata"], "options": options},
            demonstration=entry["answer"],
        )
        for number, entry in enumerate(islice(dataset, source.num_rows))
    ]
