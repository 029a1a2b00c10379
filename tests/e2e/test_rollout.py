"""The rollout pool with real Ray and real vLLM, against transformers in float32.

One pool of two engines serves all tests. Its model is made to catch every way in which an update could be lost: tied
embeddings, one dense layer and one of experts (whose width no CPU kernel likes), norms away from one, and several buckets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from otb_megatron.config import RolloutConfig
from otb_megatron.rollout.calls import Deadline, wait_for_all
from otb_megatron.rollout.pool import RolloutPool
from otb_megatron.rollout.transfer import TensorMetadata
from otb_megatron.types import Prompt, Response, UserError

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-*/= "
EOS = 1
VOCABULARY = 2 + len(CHARACTERS)
MAX_PROMPT_TOKENS = 80
MAX_RESPONSE_TOKENS = 24
BLOCK_TOKENS = 32  # of vLLM's prefix cache; only whole blocks are kept


def save_model(directory: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[0],
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=128,
        initializer_range=0.2,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)


def save_tokenizer(directory: Path) -> None:
    vocabulary = {"<pad>": 0, "<eos>": EOS} | {character: 2 + index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(directory)


@pytest.fixture(scope="module")
def models_at(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Three models of one architecture, by the policy version that they are sent as."""
    root = tmp_path_factory.mktemp("models")
    directories = {version: root / str(version) for version in (1, 2, 3)}
    for version, directory in directories.items():
        save_model(directory, seed=version)
        save_tokenizer(directory)
    return directories


@pytest.fixture(scope="module")
def pool(models_at: dict[int, Path]) -> Iterator[RolloutPool]:
    config = RolloutConfig(
        num_engines=2,
        max_response_tokens=MAX_RESPONSE_TOKENS,
        start_timeout_s=240,
        generate_timeout_s=60,
        weight_transfer_timeout_s=60,
        weight_transfer_bucket_bytes=40_000,
        vllm={"block_size": BLOCK_TOKENS},
    )
    with RolloutPool(config, model_dir=models_at[1], dtype="float32", max_prompt_tokens=MAX_PROMPT_TOKENS, load_weights=False) as pool:
        with pytest.raises(RuntimeError, match="call send_weights first"):
            pool.generate(PROMPTS, n=1, temperature=1.0, max_response_tokens=4, seed=None)
        yield pool


def prompt(row: int, length: int) -> Prompt:
    generator = torch.Generator().manual_seed(row)
    token_ids = tuple(torch.randint(2, VOCABULARY, (length,), generator=generator).tolist())
    return Prompt(id=row, data_source="test", messages=(), token_ids=token_ids, ground_truth=None)


PROMPTS = [prompt(10, 3), prompt(11, 1), prompt(12, 20), prompt(13, MAX_PROMPT_TOKENS), prompt(14, 2 * BLOCK_TOKENS + 1)]


def weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def describe(tensors: dict[str, Tensor]) -> list[TensorMetadata]:
    return [TensorMetadata(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def send(pool: RolloutPool, directory: Path, version: int) -> None:
    tensors = weights(directory)
    pool.send_weights(describe(tensors), iter(tensors.items()), version)


def logits(directory: Path, tokens: tuple[int, ...]) -> Tensor:
    """transformers' float32 logits [tokens, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def log_prob_error(directory: Path, prompt: Prompt, response: Response, temperature: float) -> float:
    rows = logits(directory, prompt.token_ids + response.token_ids)[len(prompt.token_ids) - 1 : -1]
    expected = torch.log_softmax(rows / temperature, -1).gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
    return float((expected - torch.tensor(response.log_probs)).abs().max())


def assert_samples_from(pool: RolloutPool, directory: Path, version: int) -> None:
    """Greedy tokens are transformers' and log-probs of samples are those of logits / temperature, on both engines."""
    for prompt, (response,) in zip(PROMPTS, pool.generate(PROMPTS, n=1, temperature=0, max_response_tokens=MAX_RESPONSE_TOKENS, seed=None), strict=True):
        rows = logits(directory, prompt.token_ids + response.token_ids)[len(prompt.token_ids) - 1 : -1]
        assert rows.argmax(-1).tolist() == list(response.token_ids)
        assert response.policy_version == version
    for prompt, responses in zip(PROMPTS, pool.generate(PROMPTS, n=2, temperature=0.7, max_response_tokens=MAX_RESPONSE_TOKENS, seed=None), strict=True):
        for response in responses:
            assert log_prob_error(directory, prompt, response, 0.7) < 2e-5
            assert response.policy_version == version


@pytest.mark.parametrize("version", [1, 2])
def test_engines_sample_from_each_update(pool: RolloutPool, models_at: dict[int, Path], version: int):
    """The same prompts, one of them over two cached blocks long, see only the new weights."""
    send(pool, models_at[version], version)
    assert pool.policy_version == version
    assert_samples_from(pool, models_at[version], version)


def test_finish_reasons_and_text(pool: RolloutPool):
    """The end token belongs to the response, once and last; without it the response has the full length."""
    answers = pool.generate(PROMPTS, n=12, temperature=1.0, max_response_tokens=MAX_RESPONSE_TOKENS, seed=None)
    responses = [response for group in answers for response in group]
    for response in responses:
        stopped = response.token_ids[-1] == EOS
        assert response.finish_reason == ("stop" if stopped else "length")
        assert EOS not in response.token_ids[:-1]
        assert stopped or len(response.token_ids) == MAX_RESPONSE_TOKENS
        assert response.text == "".join(CHARACTERS[token - 2] for token in response.token_ids if token > EOS)
    assert {response.finish_reason for response in responses} == {"stop", "length"}


def test_seeded_samples_do_not_depend_on_the_batch(pool: RolloutPool):
    """The first prompt is answered by the same engine in both calls, beside others and alone; n responses differ."""
    together = pool.generate(PROMPTS, n=3, temperature=1.0, max_response_tokens=8, seed=5)
    alone = pool.generate(PROMPTS[:1], n=3, temperature=1.0, max_response_tokens=8, seed=5)
    assert [response.token_ids for response in together[0]] == [response.token_ids for response in alone[0]]
    assert len({response.token_ids for response in together[0]}) > 1
    other = pool.generate(PROMPTS[:1], n=3, temperature=1.0, max_response_tokens=8, seed=6)
    assert [response.token_ids for response in other[0]] != [response.token_ids for response in alone[0]]


def test_lengths_are_checked(pool: RolloutPool):
    with pytest.raises(UserError, match=r"prompt 99 of test: 81 tokens"):
        pool.generate([prompt(99, MAX_PROMPT_TOKENS + 1)], n=1, temperature=1.0, max_response_tokens=1, seed=None)
    with pytest.raises(UserError, match=r"80 prompt tokens and 25 response tokens exceed the engines' max_model_len=104"):
        pool.generate(PROMPTS, n=1, temperature=1.0, max_response_tokens=MAX_RESPONSE_TOKENS + 1, seed=None)


def breaks_off(tensors: dict[str, Tensor], after: int) -> Iterator[tuple[str, Tensor]]:
    for index, item in enumerate(tensors.items()):
        if index == after:
            raise FloatingPointError("the trainer cannot gather this tensor")
        yield item


def test_a_failed_transfer_is_named_leaves_no_weights_and_can_be_repeated(pool: RolloutPool, models_at: dict[int, Path], monkeypatch: pytest.MonkeyPatch):
    """Each failure ends at once on every side, and the update after it is whole."""
    tensors = weights(models_at[3])
    attention = "model.layers.1.self_attn"

    def fails(error: type[Exception], message: str, described: list[TensorMetadata], values: Iterator[tuple[str, Tensor]]) -> None:
        start = time.monotonic()
        with pytest.raises(error, match=message):
            pool.send_weights(described, values, 3)
        assert time.monotonic() - start < 20  # the deadline is 60 s
        with pytest.raises(RuntimeError, match="no whole set of weights"):
            pool.generate(PROMPTS, n=1, temperature=1.0, max_response_tokens=1, seed=None)

    fails(FloatingPointError, "cannot gather", describe(tensors), breaks_off(tensors, after=len(tensors) // 2))
    without_key = {name: tensor for name, tensor in tensors.items() if name != f"{attention}.k_proj.weight"}
    # 4 query, 2 key and 2 value heads of 32 times a hidden size of 64; the keys are missing
    fails(RuntimeError, rf"{attention}.qkv_proj \(12288 of 16384 elements\)", describe(without_key), iter(without_key.items()))
    without_norm = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    fails(RuntimeError, r"model.norm \(0 of 64 elements\)", describe(without_norm), iter(without_norm.items()))
    without_expert = {name: tensor for name, tensor in tensors.items() if "experts.2.down_proj" not in name}
    fails(RuntimeError, r"experts\S* \(33792 of 36864 elements\)", describe(without_expert), iter(without_expert.items()))
    renamed = {name.replace("q_norm", "query_norm"): tensor for name, tensor in tensors.items()}
    fails(RuntimeError, "query_norm", describe(renamed), iter(renamed.items()))
    turned = tensors | {f"{attention}.o_proj.weight": tensors[f"{attention}.o_proj.weight"].T}
    fails(ValueError, "o_proj.weight", describe(tensors), iter(turned.items()))
    fails(ValueError, "end before", describe(tensors), iter(list(tensors.items())[:-1]))
    fails(ValueError, "not in the metadata", describe(tensors)[:-1], iter(tensors.items()))
    fails(ValueError, "more than once", describe(tensors) + describe(tensors)[:1], iter(tensors.items()))

    def received_but_not_taken(method: str, argument: object) -> dict[str, object]:
        if method == "finish_weights":
            raise InterruptedError(method)
        return call(method, argument)

    call = pool._sender._call
    with monkeypatch.context() as patch:
        patch.setattr(pool._sender, "_call", received_but_not_taken)
        fails(InterruptedError, "finish_weights", describe(tensors), iter(tensors.items()))

    send(pool, models_at[3], 3)
    assert_samples_from(pool, models_at[3], 3)


def test_bfloat16_tensors_are_converted_by_the_engine(pool: RolloutPool, models_at: dict[int, Path], tmp_path: Path):
    """The trainer may send its own dtype; weights of the float32 engines are then those values."""
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in weights(models_at[1]).items()}
    pool.send_weights(describe(rounded), iter(rounded.items()), 4)
    model = AutoModelForCausalLM.from_pretrained(models_at[1], dtype=torch.bfloat16)
    model.to(torch.float32).save_pretrained(tmp_path)
    assert_samples_from(pool, tmp_path, 4)


def test_an_unknown_argument_of_vllm_is_named(pool: RolloutPool):
    """The check runs in the engine, against the arguments of the vLLM that is installed there."""
    engine = pool._engines["engine 1"]
    with pytest.raises(UserError, match=r"engine 1: rollout.vllm.max_num_seq: .* did you mean 'max_num_seqs'\?"):
        wait_for_all({"engine 1": engine.start.remote({"max_num_seq": 3})}, Deadline(30, "rollout.start_timeout_s"), "starting")


def test_a_call_that_takes_too_long_is_named(pool: RolloutPool):
    calls = {"engine 0 (prompts 10)": pool._engines["engine 0"].generate.remote([PROMPTS[0].token_ids] * 64, None, {"max_tokens": 24, "n": 32})}
    with pytest.raises(UserError, match=r"still generating after 0.01 s, which is rollout.generate_timeout_s: engine 0 \(prompts 10\)"):
        wait_for_all(calls, Deadline(0.01, "rollout.generate_timeout_s"), "generating")


def test_a_dead_engine_is_named(pool: RolloutPool, models_at: dict[int, Path]):
    """The last test of the pool: it ends one engine's process."""
    import ray

    send(pool, models_at[1], 5)
    send_again = weights(models_at[1])
    ray.kill(pool._engines["engine 0"])
    with pytest.raises(UserError, match=r"engine 0 \(3 prompts, ids 10, 12, 14\) died while generating"):
        pool.generate(PROMPTS, n=1, temperature=1.0, max_response_tokens=4, seed=None)
    with pytest.raises(UserError, match="engine 0 died while taking new weights"):
        pool.send_weights(describe(send_again), iter(send_again.items()), 6)
