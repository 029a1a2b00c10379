"""Verifiers against hand-made answers, and the pool against verifiers that hang, die or return nonsense."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from otb_megatron.config import RewardConfig, SourceConfig
from otb_megatron.data.gym import gym_prompts
from otb_megatron.rewards.exact_match import exact_match
from otb_megatron.rewards.math_verify import math_verify
from otb_megatron.rewards.pool import RewardPool
from otb_megatron.rewards.reasoning_gym import reasoning_gym
from otb_megatron.rewards.registry import REWARDS, resolve
from otb_megatron.types import Prompt, Response, UserError

TIMEOUT_S = 1.0
BEHAVE = "tests.unit.bad_verifiers:behave"


def prompt(number: int = 0, ground_truth: object = "7", data_source: str = "test") -> Prompt:
    return Prompt(number, data_source, ({"role": "user", "content": "3+4="},), (1, 2), ground_truth)


def response(text: str) -> Response:
    return Response((3, 4), (-0.5, -0.25), text, "stop", 0)


# The functions


@pytest.mark.parametrize(
    ("truth", "text", "options", "score"),
    [
        ("7", " 7\n", {}, 1.0),
        ("7", "7.0", {}, 0.0),
        (7, "7", {}, 1.0),  # a number in the data file
        ("Yes", "yes", {}, 0.0),
        ("Yes", "yes", {"ignore_case": True}, 1.0),
        ("72", "so 36*2.\n#### 71\n#### 72", {"pattern": "#### (.+)"}, 1.0),  # the last match counts
        ("72", "#### 72\n#### 71", {"pattern": "#### (.+)"}, 0.0),
        ("72", "it is 72", {"pattern": "#### (.+)"}, 0.0),
        ("72", "it is 72.", {"pattern": r"\d+"}, 1.0),  # no group: the whole match
    ],
)
def test_exact_match(truth: object, text: str, options: dict, score: float) -> None:
    assert exact_match(prompt(ground_truth=truth), response(text), **options) == score


@pytest.mark.parametrize(
    ("truth", "text", "score"),
    [
        ("0.5", r"The answer is $\frac{1}{2}$.", 1.0),
        (r"\frac{1}{2}", "The answer is 1/2", 1.0),
        (r"$x^2 - 1$", r"\boxed{(x-1)(x+1)}", 1.0),
        ("72", "First $71$. Then $72$", 1.0),
        ("72", r"Either \boxed{71}. Or \boxed{72}", 0.0),  # two guesses
        (r"\{71,72\}", r"Either \boxed{71}. Or \boxed{72}", 1.0),
        ("72", "the answer is 71", 0.0),
        (72, "the answer is 72", 1.0),
        (r"\{1,2\}", r"$\{2,1\}$", 1.0),
        ("72", "I do not know", 0.0),
        ("72", "", 0.0),
    ],
)
def test_math_verify(truth: object, text: str, score: float) -> None:
    assert math_verify(prompt(ground_truth=truth), response(text)) == score


def test_math_verify_does_not_score_against_a_truth_that_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="ground truth '' is no mathematical expression"):
        math_verify(prompt(ground_truth=""), response("7"))


def test_reasoning_gym_scores_with_the_task_itself() -> None:
    # chain_sum compares as decimals; a right number inside other text earns its share of the characters.
    sums = gym_prompts(SourceConfig(reasoning_gym="chain_sum", num_rows=3))
    answer = sums[0].ground_truth
    assert reasoning_gym(sums[0], response(f" {answer}\n")) == 1.0
    assert reasoning_gym(sums[0], response(f"<answer>{answer}</answer>"), answer_tag="answer") == 1.0
    assert reasoning_gym(sums[0], response(answer), answer_tag="answer") == 0.0
    assert reasoning_gym(sums[0], response(f"x{answer}")) == len(answer) / (len(answer) + 1)
    # countdown has no single right answer: any expression over the numbers that reaches the target is right, by the entry's metadata.
    (countdown,) = gym_prompts(SourceConfig(reasoning_gym="countdown", num_rows=1))
    assert reasoning_gym(countdown, response(countdown.extra_info["metadata"]["expression"])) == 1.0
    with pytest.raises(ValueError, match="'test' with extra_info keys .* does not come from reasoning-gym"):
        reasoning_gym(prompt(), response("7"))


# Names


def test_every_name_resolves_to_a_function_of_that_name() -> None:
    assert [resolve(name).__name__ for name in REWARDS] == list(REWARDS)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("math_verfy", {}, "rewards.function='math_verfy' is unknown; did you mean 'math_verify'.*package.module:function"),
        ("zzz", {}, "known are exact_match, math_verify, reasoning_gym"),
        ("no_such_module:score", {}, "module 'no_such_module' cannot be imported: ModuleNotFoundError.*PYTHONPATH"),
        ("tests.unit.bad_verifiers:behav", {}, "tests.unit.bad_verifiers has no function 'behav'; did you mean 'behave'"),
        ("exact_match", {"patern": "x"}, "rewards.options={'patern': 'x'}: got an unexpected keyword argument 'patern'; its signature is .*pattern"),
        ("os:getcwd", {}, "'os:getcwd' cannot be called as function.prompt, response"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_any_process_starts(name: str, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RewardPool(RewardConfig(function=name, options=options))


def test_a_function_that_only_the_trainer_can_import_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("made_here")
    module.score = lambda prompt, response: 1.0
    monkeypatch.setitem(sys.modules, "made_here", module)
    with RewardPool(RewardConfig(function="made_here:score")) as pool:
        with pytest.raises(UserError, match="module 'made_here' cannot be imported"):
            pool.score(pairs([""]))
        with pytest.raises(UserError, match="the reward server process has ended"):
            pool.score(pairs([""]))


# The pool


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One line for each call made: prompt id and process id."""
    return tmp_path_factory.mktemp("rewards") / "calls"


@pytest.fixture(scope="module")
def pool(log: Path) -> Iterator[RewardPool]:
    config = RewardConfig(function=BEHAVE, options={"log": str(log)}, timeout_s=TIMEOUT_S, num_workers=2, max_failures=20, failure_reward=-1.0)
    with RewardPool(config) as pool:
        yield pool


def pairs(texts: list[str]) -> list[tuple[Prompt, Response]]:
    return [(prompt(number), response(text)) for number, text in enumerate(texts)]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_scores_come_in_order_from_as_many_processes_as_asked_for(pool: RewardPool, log: Path) -> None:
    processes: set[str] = set()
    for _ in range(50):  # on a busy machine one process answers whole batches before the other has started
        batch = pool.score(pairs([""] * 300))
        assert batch.rewards == [1000.0 + number for number in range(300)] and batch.failures == []
        processes |= {line.split()[1] for line in log.read_text().splitlines()}
        if len(processes) > 1:
            break
    assert len(processes) == 2
    assert pool.score([]).rewards == []


@pytest.mark.parametrize(("text", "score"), [("true", 1.0), ("float32", 0.5), ("bool_", 1.0), ("fork", 5.0)])
def test_numbers_of_other_kinds_are_scores(pool: RewardPool, text: str, score: float) -> None:
    batch = pool.score(pairs(["", text, ""]))
    assert batch.rewards == [1000.0, score, 1002.0] and batch.failures == []


MISBEHAVIOURS = {
    "spin": ("timeout", "no result within rewards.timeout_s=1 s"),
    "sleep": ("timeout", "no result within rewards.timeout_s=1 s"),
    "raise": ("raised", "KeyError: 'no such unit'"),
    "leave": ("raised", "SystemExit: 3"),
    "ask": ("raised", "EOFError"),
    "huge": ("raised", "OverflowError"),
    "die": ("crashed", "its process ended (exit code 0) before it returned"),
    "segfault": ("crashed", "its process ended (SIGSEGV) before it returned"),
    "close": ("crashed", "its process ended"),
    "object": ("crashed", "its process ended"),
    "none": ("not a number", "it returned None"),
    "nan": ("not a number", "it returned nan"),
    "text": ("not a number", "it returned '1.0'"),
}


def test_every_misbehaviour_fails_alone_and_in_bounded_time(pool: RewardPool, log: Path) -> None:
    texts = [""] * 5
    for behaviour in MISBEHAVIOURS:
        texts += [behaviour, "", "", ""]
    log.write_text("")
    started = time.monotonic()
    batch = pool.score(pairs(texts))
    assert time.monotonic() - started < 10  # two of the calls hang for a second

    assert batch.rewards == [-1.0 if text else 1000.0 + number for number, text in enumerate(texts)]
    assert [failure.index for failure in batch.failures] == [number for number, text in enumerate(texts) if text]
    for failure in batch.failures:
        kind, message = MISBEHAVIOURS[texts[failure.index]]
        assert (failure.prompt_id, failure.kind) == (failure.index, kind) and message in failure.message
    called = sorted(int(line.split()[0]) for line in log.read_text().splitlines())
    assert called == list(range(len(texts)))  # each once, also those that were behind a lost one

    again = pool.score(pairs([""] * 20))
    assert again.rewards == [1000.0 + number for number in range(20)] and again.failures == []


def test_a_killed_verifier_takes_the_processes_that_it_started_along(pool: RewardPool, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    assert pool.score(pairs([f"hang {pids}"])).failures[0].kind == "timeout"
    verifier, child, server = map(int, pids.read_text().split())
    assert eventually(lambda: gone(verifier) and gone(child)) and not gone(server)


def worker_pids(pool: RewardPool, log: Path) -> set[int]:
    log.write_text("")
    assert pool.score(pairs([""] * 50)).failures == []
    return {int(line.split()[1]) for line in log.read_text().splitlines()}


def test_workers_that_die_or_stall_between_batches_are_replaced(pool: RewardPool, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otb_megatron.rewards.pool.SEND_TIMEOUT_S", 1)  # of the workers started from here on
    dead = worker_pids(pool, log)
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda pid=pid: gone(pid))
    stalled = worker_pids(pool, log)
    assert not stalled & dead
    for pid in stalled:
        os.kill(pid, signal.SIGSTOP)
    # More bytes than a socket buffers, so that handing them over is what stalls; none of the calls is lost or blamed.
    large = [(replace(p, extra_info={"document": "x" * 2**20}), r) for p, r in pairs([""] * 8)]
    batch = pool.score(large)
    assert batch.failures == [] and batch.rewards == [1000.0 + number for number in range(8)]
    assert not worker_pids(pool, log) & stalled


def test_too_many_failures_stop_the_batch_and_name_the_first(pool: RewardPool) -> None:
    texts = ["", "none " + "long " * 100] + ["raise"] * 30 + ["sleep"]
    with pytest.raises(UserError) as caught:
        pool.score(pairs(texts))
    message = str(caught.value)
    assert f"of 33 calls of rewards.function='{BEHAVE}' failed, more than rewards.max_failures=20" in message
    assert "prompt 1, response 'none long long" in message and "long ...': not a number: it returned None" in message
    assert "prompt 2, response 'raise': raised: KeyError: 'no such unit'" in message and "bad_verifiers.py:" in message
    assert "rewards.timeout_s" in message and "rewards.failure_reward" in message
    assert len(message.splitlines()) == 7  # five failures shown
    assert pool.score(pairs([""] * 20)).rewards == [1000.0 + number for number in range(20)]  # nothing of the old batch is left


def test_cheap_calls_are_cheap(pool: RewardPool) -> None:
    """512 calls, one step's worth, take 0.05 s on an idle machine; the bound is for a busy one."""
    work = pairs([""] * 512)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        pool.score(work)
        best = min(best, time.perf_counter() - started)
    assert best < 0.5


def train_with_a_hanging_verifier(pids: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    with RewardPool(RewardConfig(function=BEHAVE, timeout_s=1000, num_workers=1)) as pool:
        bystander = os.fork()  # some library's process, which inherits every connection of the pool
        if bystander == 0:
            time.sleep(60)
            os._exit(0)
        pids.with_suffix(".bystander").write_text(str(bystander))
        pool.score(pairs([f"hang {pids}"]))


def test_no_process_outlives_the_trainer(tmp_path: Path) -> None:
    """Killed outright, or stopped by Ctrl-C, while the verifier hangs with a child of its own and a fork of the trainer lives on."""
    fork = multiprocessing.get_context("fork")
    trainers = {how: fork.Process(target=train_with_a_hanging_verifier, args=(tmp_path / how.name,)) for how in (signal.SIGKILL, signal.SIGINT)}
    for trainer in trainers.values():
        trainer.start()
    for how, trainer in trainers.items():
        pids = tmp_path / how.name
        assert eventually(lambda pids=pids: pids.exists() and len(pids.read_text().split()) == 3, 120)
        family = [int(pid) for pid in pids.read_text().split()]  # verifier, its child, and the server
        os.kill(trainer.pid, how)
        assert eventually(lambda family=family: all(gone(pid) for pid in family))
        os.kill(int(pids.with_suffix(".bystander").read_text()), signal.SIGKILL)
        trainer.join(10)
        assert trainer.exitcode == {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 1}[how]
