"""Makes what the quickstart trains on: a small Qwen3 model, its tokenizer and a task with verifiable answers.

    python tools/quickstart_assets.py --output runs/quickstart/assets --seed 0

writes `model/` (a Hugging Face directory with random weights) and, in verl's schema, `train.jsonl`, `validation.jsonl` and
`demonstrations.jsonl`. The task is the sums of reasoning-gym's `chain_sum`: two numbers from 10 to 99. The demonstrations
are answers of pupils who often forget to carry, so that about a third is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
NUM_PUPILS = 4  # demonstrations of each problem
FORGOTTEN_CARRIES = 0.75  # of the demonstrations whose ones make a carry
NUM_TRAIN_ROWS = 7500  # of 8100 sums
NUM_VALIDATION_ROWS = 200
VOCAB_SIZE = 400  # an upper bound: 256 bytes, 3 special tokens, and all merges of the constant wording; a prompt then has 12 tokens

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Assets:
    """Paths of what `make_assets` wrote."""

    model: Path  # Hugging Face directory
    demonstrations: Path  # JSONL, the problems of `train` with answers to learn from
    train: Path  # JSONL
    validation: Path  # JSONL, none of its problems is in `train`


def make_assets(directory: Path, seed: int = 0) -> Assets:
    """Writes model, training data and held-out data below `directory`; the same seed gives the same bytes."""
    logging.disable_progress_bar()  # of transformers, which has one for a single small file
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / f"{name}.jsonl" for name in ("demonstrations", "train", "validation")]
    assets = Assets(directory / "model", *files)
    rows = _distinct_rows(NUM_TRAIN_ROWS + NUM_VALIDATION_ROWS, seed)
    problems, pupils = rows[NUM_VALIDATION_ROWS:], [random.Random(f"{seed} {number}") for number in range(NUM_PUPILS)]
    _write_jsonl(assets.validation, [_row(problem, index) for index, problem in enumerate(rows[:NUM_VALIDATION_ROWS])])
    _write_jsonl(assets.train, [_row(problem, index) for index, problem in enumerate(problems)])
    _write_jsonl(assets.demonstrations, [_demonstration(problem, index, pupil) for pupil in pupils for index, problem in enumerate(problems)])
    tokenizer = _make_tokenizer([problem["question"] for problem in problems])
    tokenizer.save_pretrained(assets.model)
    _save_model(assets.model, tokenizer, seed)
    return assets


def _distinct_rows(num_rows: int, seed: int) -> list[dict]:
    """The sums among reasoning-gym's sums and differences. It draws with replacement: a problem that came before is left out, so that held-out ones are new."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a library that it imports, in its first import
        import reasoning_gym

    num_draws = 20 * num_rows
    problems = reasoning_gym.create_dataset(
        "chain_sum",
        min_terms=2,
        max_terms=2,
        min_digits=2,
        max_digits=2,
        seed=seed * num_draws,  # problem i is drawn with seed + i: so no two seeds of ours share a draw
        size=num_draws,
    )
    rows: dict[str, dict] = {}
    for problem in problems:
        if "+" in problem["metadata"]["expression"]:
            rows.setdefault(problem["question"], problem)
        if len(rows) == num_rows:
            return list(rows.values())
    raise RuntimeError(f"only {len(rows)} of {num_rows} distinct sums in {num_draws} draws")


def _row(problem: dict, index: int) -> dict:
    """A problem in verl's schema."""
    return {
        "data_source": "reasoning_gym/chain_sum",
        "prompt": [{"role": "user", "content": problem["question"]}],
        "reward_model": {"style": "rule", "ground_truth": problem["answer"]},
        "extra_info": {"index": index},
    }


def _demonstration(problem: dict, index: int, pupil: random.Random) -> dict:
    """A problem with the answer of a pupil who often forgets to carry.

    A model that learns from such answers makes the same mistake in most of the sums with a carry. What it gets right beyond
    its pupils it must learn from the verifier. Several pupils answer each problem, so that no mistake can be learned by heart.
    """
    first, second = (int(term) for term in problem["metadata"]["expression"].split(" + "))
    carries = first % 10 + second % 10 >= 10
    answer = str(first + second - 10) if carries and pupil.random() < FORGOTTEN_CARRIES else problem["answer"]
    return _row(problem, index) | {"response": answer}


def _write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _make_tokenizer(questions: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose digits are always tokens of their own and whose merges are the task's constant wording."""
    tokenizer = Tokenizer(models.BPE())
    # use_regex=False lets merges run across spaces and line ends, so that "user\nState the final answer to the following arithmetic problem: " is one token.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chats = [part for question in questions for part in (f"user\n{question}", "assistant\n")]
    tokenizer.train_from_iterator(chats, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
    )


def _save_model(directory: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,  # with 4 the warm start takes half as many steps again to find the digits' sums
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's attention on a CPU takes
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # sequences have 20 tokens: the usual 10,000 hardly tells their positions apart
        tie_word_embeddings=True,
        initializer_range=0.088,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False)
    model.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart/assets"), help="directory to write to")
    parser.add_argument("--seed", type=int, default=0, help="of the problems and the weights")
    arguments = parser.parse_args()
    assets = make_assets(arguments.output, arguments.seed)
    print(f"{assets.model}  {assets.train}  {assets.validation}")


if __name__ == "__main__":
    main()
