"""The order in which a run visits its prompts, resumable at any step."""

from __future__ import annotations

from typing import Any

import numpy as np

from otb_megatron.types import UserError


class PromptOrder:
    """Endless epochs over `num_prompts` prompts: each prompt exactly once an epoch, a batch may reach over the end of one.

    An epoch's order depends on (seed, epoch) only, so the whole state is the epoch and the position in it.
    """

    def __init__(self, num_prompts: int, *, shuffle: bool, seed: int) -> None:
        if num_prompts < 1:
            raise ValueError("no prompts to order")
        self._fixed = {"num_prompts": num_prompts, "shuffle": shuffle, "seed": seed}
        self._start(epoch=0, position=0)

    @property
    def epoch(self) -> int:
        """Completed passes over the prompts."""
        return self._epoch

    def next(self, count: int) -> list[int]:
        """The next `count` indices into the prompts. A count above `num_prompts` repeats prompts, each as often as it must."""
        indices: list[int] = []
        while len(indices) < count:
            taken = self._order[self._position : self._position + count - len(indices)]
            indices += taken
            if self._position + len(taken) == len(self._order):
                self._start(epoch=self._epoch + 1, position=0)
            else:
                self._position += len(taken)
        return indices

    def state_dict(self) -> dict[str, Any]:
        return {**self._fixed, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues exactly where `state` was taken.

        Raises:
            UserError: the state was taken over other data or in another order, all differences named.
        """
        changed = [f"{key} was {state[key]!r} and is now {value!r}" for key, value in self._fixed.items() if state[key] != value]
        if changed:
            raise UserError(
                f"the checkpoint cannot continue over these prompts: {'; '.join(changed)}. "
                "Restore data.train, data.max_prompt_tokens, data.shuffle and data.seed, or start a new run in another trainer.output_dir"
            )
        self._start(state["epoch"], state["position"])

    def _start(self, epoch: int, position: int) -> None:
        num_prompts, seed = self._fixed["num_prompts"], self._fixed["seed"]
        # Sorted raw draws rather than Generator.permutation: numpy keeps a bit generator's stream across versions, not a Generator's.
        keys = np.random.PCG64([seed % 2**64, epoch]).random_raw(num_prompts) if self._fixed["shuffle"] else np.zeros(num_prompts)
        self._order = np.argsort(keys, kind="stable").tolist()
        self._epoch, self._position = epoch, position
