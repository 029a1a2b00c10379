"""Prompts from files and from reasoning-gym: what is read, what is refused, and with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from otb_megatron.config import SourceConfig
from otb_megatron.data.sources import PromptSet, demonstration_tokens, load_prompts
from otb_megatron.types import Prompt, UserError

# One token a character, and one each for start and end of a turn: token ids can be checked by hand.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<s>' + m.role[0] + m.content + '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>a' }}{% endif %}"
)
CHARACTERS = " +=0123456789asuxyz"
START, END = len(CHARACTERS), len(CHARACTERS) + 1


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: index for index, character in enumerate(CHARACTERS)}
    core = Tokenizer(models.WordLevel({**vocabulary, "<s>": START, "</s>": END, "?": END + 1}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="?")
    fast.chat_template = TEMPLATE
    return fast


def ids(text: str) -> tuple[int, ...]:
    """`[` and `]` for start and end of a turn."""
    return tuple((CHARACTERS + "[]").index(character) for character in text)


def row(content: str = "1+2=", truth: Any = "3", **more: Any) -> dict[str, Any]:
    return {"data_source": "sums", "prompt": [{"role": "user", "content": content}], "reward_model": {"style": "rule", "ground_truth": truth}, **more}


def write_jsonl(path: Path, rows: list[Any]) -> SourceConfig:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in rows))
    return SourceConfig(path=path)


def load(source: SourceConfig, tokenizer: PreTrainedTokenizerFast, max_prompt_tokens: int = 100, overlong: Any = "filter") -> PromptSet:
    return load_prompts(source, tokenizer, max_prompt_tokens=max_prompt_tokens, overlong=overlong)


def refusal(source: SourceConfig, tokenizer: PreTrainedTokenizerFast, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(source, tokenizer, **options)
    return str(caught.value)


def test_a_row_in_full(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    system = {"role": "system", "content": "xyz"}
    full = row(extra_info={"split": "train", "index": 5}, response="x=3", ability="ignored")
    full["prompt"].insert(0, system)
    loaded = load(write_jsonl(tmp_path / "train.jsonl", [full]), tokenizer)
    assert loaded == PromptSet(
        prompts=[
            Prompt(
                id=0,
                data_source="sums",
                messages=(system, {"role": "user", "content": "1+2="}),
                token_ids=ids("[sxyz][u1+2=][a"),
                ground_truth="3",
                extra_info={"split": "train", "index": 5},
                demonstration="x=3",
            )
        ],
        num_filtered=0,
    )


def test_all_kinds_of_files_give_the_same_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Rows of unequal fields, as Parquet unifies them: what one row lacks comes back as a null."""
    rows = [row("1+2=", "3"), row("2+2=", "4", extra_info={"index": 7}, response="x"), row("3+3=", "6", extra_info={"level": "z"})]
    columns = {key: [r.get(key) for r in rows] for key in ("data_source", "prompt", "reward_model", "extra_info", "response")}
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "directory")

    expected = load(write_jsonl(tmp_path / "train.jsonl", rows), tokenizer).prompts
    assert [(p.id, p.token_ids, p.ground_truth, p.demonstration) for p in expected] == [
        (0, ids("[u1+2=][a"), "3", "3"),
        (1, ids("[u2+2=][a"), "4", "x"),
        (2, ids("[u3+3=][a"), "6", "6"),
    ]
    for path in (tmp_path / "train.parquet", tmp_path / "directory"):
        prompts = load(SourceConfig(path=path), tokenizer).prompts
        assert [(p.id, p.messages, p.token_ids, p.ground_truth, p.demonstration) for p in prompts] == [
            (p.id, p.messages, p.token_ids, p.ground_truth, p.demonstration) for p in expected
        ]
        assert prompts[0].extra_info == {} and prompts[1].extra_info["index"] == 7


def test_ground_truth_may_be_anything_and_only_text_is_a_demonstration(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    loaded = load(write_jsonl(tmp_path / "t.jsonl", [row(truth={"tests": [1, 2]}), row(truth=0)]), tokenizer)
    assert [(p.ground_truth, p.demonstration) for p in loaded.prompts] == [({"tests": [1, 2]}, None), (0, None)]


def test_num_rows_and_blank_lines(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", [row("1"), "", row("2"), "not json"])
    assert [p.id for p in load(source.model_copy(update={"num_rows": 2}), tokenizer).prompts] == [0, 1]
    assert "t.jsonl:4: not valid JSON" in refusal(source, tokenizer)  # the line, not the row


def test_overlong_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """`[u...][a` is 5 tokens around the content, so 6, 9 and 7 tokens; ids stay row numbers."""
    source = write_jsonl(tmp_path / "t.jsonl", [row("1"), row("1+2="), row("12")])
    loaded = load(source, tokenizer, max_prompt_tokens=7)
    assert ([p.id for p in loaded.prompts], loaded.num_filtered) == ([0, 2], 1)
    assert [p.id for p in load(source, tokenizer, max_prompt_tokens=9, overlong="reject").prompts] == [0, 1, 2]

    message = refusal(source, tokenizer, max_prompt_tokens=6, overlong="reject")
    assert "2 prompt(s) exceed data.max_prompt_tokens=6" in message and "t.jsonl:2: 9 tokens" in message and "t.jsonl:3: 7 tokens" in message
    assert "data.overlong_prompts=filter" in message
    assert "all 3 prompts exceed data.max_prompt_tokens=5 (the shortest has 6 tokens)" in refusal(source, tokenizer, max_prompt_tokens=5)


def test_every_malformed_row_is_named_at_once(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    image = {"role": "user", "content": [{"type": "image"}]}
    call = {"role": "user", "content": "x", "tool_calls": ["f"], "name": None}
    source = write_jsonl(
        tmp_path / "bad.jsonl",
        [
            row(),
            '{"data_source": "sums", ',
            [1, 2],
            {"data_source": 5, "prompt": [], "reward_model": {}},
            {**row(), "prompt": [image, "hello", call]},
            row(truth=None),
            row(extra_info="x", response=3),
            {"prompt": "1+2="},
        ],
    )
    lines = refusal(source, tokenizer).splitlines()
    assert lines[0] == f"{source.path}: 7 row(s) cannot be used:"
    assert lines[1].startswith("  bad.jsonl:2: not valid JSON (Expecting property name")
    assert lines[2] == "  bad.jsonl:3: a row must be a JSON object with data_source, prompt and reward_model, not list [1, 2]"
    assert lines[3] == (
        "  bad.jsonl:4: `prompt` must be a list of chat messages such as {'role': 'user', 'content': '...'}, not list []; "
        "`data_source` must be text, not int 5; `reward_model.ground_truth` is missing"
    )
    assert lines[4] == (
        "  bad.jsonl:5: `prompt[0].content` must be text, not list [{'type': 'image'}]; `prompt[1]` must be a message with role and content, "
        "not str 'hello'; `prompt[2]` has tool_calls; only role and content are supported"
    )
    assert lines[5] == "  bad.jsonl:6: `reward_model.ground_truth` is missing"
    assert lines[6] == "  bad.jsonl:7: `extra_info` must be a mapping, not str 'x'; `response` must be text, not int 3"
    assert "`prompt` must be a list" in lines[7] and "not str '1+2='" in lines[7] and "`data_source` must be text, not nothing" in lines[7]
    assert len(lines) == 8


def test_a_long_list_of_faults_is_cut(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    lines = refusal(write_jsonl(tmp_path / "bad.jsonl", ["{}"] * 25), tokenizer).splitlines()
    assert len(lines) == 22 and "25 row(s)" in lines[0] and lines[20].startswith("  bad.jsonl:20:") and lines[21] == "  ... and 5 more"


def test_malformed_parquet_rows_are_numbered(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    pq.write_table(pa.table({"data_source": ["sums", None], "prompt": [row()["prompt"]] * 2}), tmp_path / "bad.parquet")
    message = refusal(SourceConfig(path=tmp_path / "bad.parquet"), tokenizer)
    assert "bad.parquet row 0: `reward_model.ground_truth` is missing" in message
    assert "bad.parquet row 1: `data_source` must be text, not nothing; `reward_model.ground_truth` is missing" in message


def test_what_the_template_refuses_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tool = row()
    tool["prompt"][0]["role"] = "tool"
    assert "t.jsonl:2: the chat template refuses the messages: no tools here" in refusal(write_jsonl(tmp_path / "t.jsonl", [row(), tool]), tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "none.jsonl does not exist; set `path`"),
        ("t.json", b"{}", "is of no known kind; known are .jsonl and .parquet"),
        ("t.parquet", b"not parquet", "t.parquet is not a Parquet file"),
        ("t.jsonl", b"\n", "t.jsonl holds no rows"),
        ("t.jsonl", b"\xff\n", "t.jsonl:1: not valid JSON"),
    ],
)
def test_unusable_files(name: str, content: bytes | None, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert message in refusal(SourceConfig(path=tmp_path / name), tokenizer)


def test_unusable_directories(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    assert "was not written by datasets' save_to_disk" in refusal(SourceConfig(path=tmp_path), tokenizer)
    one = datasets.Dataset.from_list([row()])
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "splits")
    message = refusal(SourceConfig(path=tmp_path / "splits"), tokenizer)
    assert f"holds the splits train, test; point to one of them, for example {tmp_path / 'splits' / 'train'}" in message
    assert len(load(SourceConfig(path=tmp_path / "splits" / "train"), tokenizer).prompts) == 1


def test_a_tokenizer_without_chat_template(tmp_path: Path) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x")), unk_token="x")
    assert "has no chat template" in refusal(write_jsonl(tmp_path / "t.jsonl", [row()]), bare)
    with pytest.raises(UserError, match="has no end-of-sequence token; set tokenizer.eos_token"):
        demonstration_tokens(bare, Prompt(0, "sums", (), (0,), "x", demonstration="x"))


def test_demonstration_is_what_the_template_writes_for_an_answer(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (prompt,) = load(write_jsonl(tmp_path / "t.jsonl", [row(response="x=3")]), tokenizer).prompts
    assert demonstration_tokens(tokenizer, prompt) == ids("x=3]")
    conversation = [*prompt.messages, {"role": "assistant", "content": "x=3"}]
    assert tuple(tokenizer.apply_chat_template(conversation)["input_ids"]) == prompt.token_ids + demonstration_tokens(tokenizer, prompt)
    with pytest.raises(UserError, match="prompt 4 of 'sums' has no demonstration.*`response`"):
        demonstration_tokens(tokenizer, Prompt(4, "sums", (), (0,), {"tests": []}))


def test_reasoning_gym(tokenizer: PreTrainedTokenizerFast) -> None:
    source = SourceConfig(reasoning_gym="chain_sum", reasoning_gym_options={"min_terms": 2, "max_terms": 2, "max_digits": 2}, num_rows=50)
    prompts = load(source, tokenizer, max_prompt_tokens=1000).prompts
    assert [p.id for p in prompts] == list(range(50)) and {p.data_source for p in prompts} == {"reasoning_gym/chain_sum"}
    for prompt in prompts:
        first, sign, second = prompt.extra_info["metadata"]["expression"].split()
        assert int(prompt.ground_truth) == int(first) + int(f"{sign}{second}") and prompt.demonstration == prompt.ground_truth
        assert prompt.messages[0]["role"] == "user" and f"{first} {sign} {second}" in prompt.messages[0]["content"]
        assert prompt.token_ids[:2] == (START, CHARACTERS.index("u")) and prompt.token_ids[-2:] == ids("[a")
    assert load(source, tokenizer, max_prompt_tokens=1000).prompts == prompts  # the seed is fixed unless set
    other = source.model_copy(update={"reasoning_gym_options": {**source.reasoning_gym_options, "seed": 1}})
    assert load(other, tokenizer, max_prompt_tokens=1000).prompts != prompts


def test_reasoning_gym_num_rows_cuts_a_larger_size(tokenizer: PreTrainedTokenizerFast) -> None:
    source = SourceConfig(reasoning_gym="chain_sum", reasoning_gym_options={"size": 5}, num_rows=3)
    assert len(load(source, tokenizer, max_prompt_tokens=1000).prompts) == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sums", {}, "reasoning_gym='chain_sums': reasoning-gym has no such task; did you mean 'chain_sum'?"),
        ("qqqqq", {}, "known are .*chain_sum"),
        ("chain_sum", {"min_term": 2}, "does not take reasoning_gym_options={'min_term': 2}: .*min_term"),
        ("chain_sum", {"min_terms": -1}, "does not take reasoning_gym_options={'min_terms': -1}: min_terms must be positive"),
    ],
)
def test_reasoning_gym_refusals(name: str, options: dict, message: str, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match=message):
        load(SourceConfig(reasoning_gym=name, reasoning_gym_options=options), tokenizer)
