"""Prompts from a user's data, checked and tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from otb_megatron.config import SourceConfig
from otb_megatron.data.gym import gym_prompts
from otb_megatron.data.rows import read_rows
from otb_megatron.types import Prompt, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_LISTED = 20  # faults printed in full; a file written by the wrong program has one a row


@dataclass(frozen=True)
class PromptSet:
    prompts: list[Prompt]  # in the order of the source
    num_filtered: int  # prompts left out because they were too long


def load_prompts(source: SourceConfig, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int, overlong: Literal["filter", "reject"]) -> PromptSet:
    """Reads, checks and tokenises every prompt of a source.

    A row follows verl's schema: `data_source` (text), `prompt` (chat messages with text content), `reward_model.ground_truth`
    (anything) and, optionally, `extra_info` (a mapping) and `response` (a good answer, for supervised fine-tuning; without it
    a ground truth that is text serves). A prompt's id is its row number, whether or not other rows are filtered.

    Args:
        overlong: what becomes of prompts above `max_prompt_tokens`: left out and counted, or an error that lists them.

    Raises:
        UserError: an unusable source, all malformed rows at once with file and line, a tokenizer without a chat template, or
            no prompt left.
    """
    origin = str(source.path or f"reasoning_gym={source.reasoning_gym}")
    if tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template, so {origin} cannot be turned into prompts; "
            "set tokenizer.chat_template and save_pretrained it into model.path (for example the template of the model's instruct version)"
        )
    if source.reasoning_gym is not None:
        prompts = gym_prompts(source)
        places = [f"entry {prompt.id}" for prompt in prompts]
    else:
        prompts, places = _file_prompts(source)
    if not prompts:
        raise UserError(f"{origin} holds no rows")
    prompts = _tokenized(prompts, places, origin, tokenizer)

    too_long = [len(prompt.token_ids) > max_prompt_tokens for prompt in prompts]
    if overlong == "reject" and any(too_long):
        faults = [f"{place}: {len(p.token_ids)} tokens" for p, place, long in zip(prompts, places, too_long, strict=True) if long]
        title = f"{origin}: {len(faults)} prompt(s) exceed data.max_prompt_tokens={max_prompt_tokens}"
        raise UserError(_listing(title, faults) + "\nRaise data.max_prompt_tokens, or set data.overlong_prompts=filter to leave them out")
    kept = [prompt for prompt, long in zip(prompts, too_long, strict=True) if not long]
    if not kept:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        raise UserError(
            f"{origin}: all {len(prompts)} prompts exceed data.max_prompt_tokens={max_prompt_tokens} (the shortest has {shortest} tokens); raise it"
        )
    return PromptSet(kept, num_filtered=len(prompts) - len(kept))


def demonstration_tokens(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of the prompt's known good answer as the policy would have sampled them: the text, then end of sequence.

    The text is encoded apart from the prompt, as sampled text is, so prompt and answer never merge into one token.

    Raises:
        UserError: the prompt has no demonstration, or the tokenizer no end-of-sequence token.
    """
    if prompt.demonstration is None:
        raise UserError(
            f"prompt {prompt.id} of {prompt.data_source!r} has no demonstration to fine-tune on; "
            "give the data a text column `response`, or a ground truth that is text"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token; set tokenizer.eos_token and save it into model.path")
    return (*tokenizer(prompt.demonstration, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)


def _file_prompts(source: SourceConfig) -> tuple[list[Prompt], list[str]]:
    """Prompts of a file, not yet tokenised, and their places."""
    prompts, places, faults = [], [], []
    for row in read_rows(source.path, source.num_rows):
        wrong = [row.fault] if row.fault else _row_faults(row.values)
        if wrong:
            faults.append(f"{row.place}: {'; '.join(wrong)}")
            continue
        prompts.append(_prompt(row.number, row.values))
        places.append(row.place)
    if faults:
        raise UserError(_listing(f"{source.path}: {len(faults)} row(s) cannot be used", faults))
    return prompts, places


def _prompt(number: int, values: dict[str, Any]) -> Prompt:
    ground_truth = values["reward_model"]["ground_truth"]
    demonstration = values.get("response")
    if demonstration is None and isinstance(ground_truth, str):
        demonstration = ground_truth
    return Prompt(
        id=number,
        data_source=values["data_source"],
        messages=tuple({"role": message["role"], "content": message["content"]} for message in values["prompt"]),
        token_ids=(),
        ground_truth=ground_truth,
        extra_info=values.get("extra_info") or {},
        demonstration=demonstration,
    )


def _row_faults(values: Any) -> list[str]:
    """Everything that is wrong with one row. A null counts as absent: columnar files have no other way to leave a field out."""
    if not isinstance(values, dict):
        return [f"a row must be a JSON object with data_source, prompt and reward_model, not {_shown(values)}"]
    faults = _message_faults(values.get("prompt"))
    if not isinstance(values.get("data_source"), str):
        faults.append(f"`data_source` must be text, not {_shown(values.get('data_source'))}")
    reward_model = values.get("reward_model")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        faults.append("`reward_model.ground_truth` is missing")
    if not isinstance(values.get("extra_info"), dict | None):
        faults.append(f"`extra_info` must be a mapping, not {_shown(values['extra_info'])}")
    if not isinstance(values.get("response"), str | None):
        faults.append(f"`response` must be text, not {_shown(values['response'])}")
    return faults


def _message_faults(messages: Any) -> list[str]:
    if not isinstance(messages, list) or not messages:
        return [f"`prompt` must be a list of chat messages such as {{'role': 'user', 'content': '...'}}, not {_shown(messages)}"]
    faults = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            faults.append(f"`prompt[{index}]` must be a message with role and content, not {_shown(message)}")
            continue
        not_text = [key for key in ("role", "content") if not isinstance(message.get(key), str)]
        faults += [f"`prompt[{index}].{key}` must be text, not {_shown(message.get(key))}" for key in not_text]
        unknown = [key for key, value in message.items() if key not in ("role", "content") and value is not None]
        if unknown:
            faults.append(f"`prompt[{index}]` has {', '.join(unknown)}; only role and content are supported")
    return faults


def _tokenized(prompts: list[Prompt], places: list[str], origin: str, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The prompts with their token ids. Rendered one by one, so that a row which the template refuses is named, and encoded together."""
    texts, faults = [], []
    for prompt, place in zip(prompts, places, strict=True):
        try:
            text = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            faults.append(f"{place}: the chat template refuses the messages: {error}")
            continue
        if not text:
            faults.append(f"{place}: the chat template makes nothing of the messages")
        texts.append(text)
    if faults:
        raise UserError(_listing(f"{origin}: {len(faults)} row(s) cannot be used", faults))
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [replace(prompt, token_ids=tuple(ids)) for prompt, ids in zip(prompts, encoded, strict=True)]


def _listing(title: str, faults: Sequence[str]) -> str:
    lines = [title + ":", *(f"  {fault}" for fault in faults[:MAX_LISTED])]
    if len(faults) > MAX_LISTED:
        lines.append(f"  ... and {len(faults) - MAX_LISTED} more")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
