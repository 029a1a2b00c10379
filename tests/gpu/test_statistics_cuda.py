"""The statistics head on a CUDA device: Triton kernels and the fused projection against float64 on the same device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from otb_megatron.ops.statistics import policy_statistics, policy_statistics_from_logits, reference_policy_statistics

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, TEMPERATURE = 257, 192, 0.8
# bfloat16 and float16 logits are compared with what the same rounded logits give in float64, so the tolerance is that of float32 sums.
TOLERANCE = dict(rtol=2e-5, atol=2e-6)


def _logits(vocab_size: int, padded: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 4 * torch.randn(TOKENS, padded, device="cuda", generator=generator)
    logits[:, vocab_size:] = 1e4  # padding must not be read
    return logits.to(dtype), torch.randint(0, vocab_size, (TOKENS,), device="cuda", generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab_size", "padded"), [(97, 128), (1000, 1000), (32000, 32768)])
def test_from_logits(vocab_size: int, padded: int, dtype: torch.dtype) -> None:
    logits, targets = _logits(vocab_size, padded, dtype)
    logits.requires_grad_()
    found = policy_statistics_from_logits(logits, targets, vocab_size=vocab_size, temperature=TEMPERATURE)
    wide = logits.detach()[:, :vocab_size].double().requires_grad_()
    expected = reference_policy_statistics(wide, targets, TEMPERATURE)
    for name in ("log_prob", "entropy", "rest"):
        torch.testing.assert_close(getattr(found, name).double(), getattr(expected, name).detach(), **TOLERANCE)
    found.log_prob.sum().backward()
    expected.log_prob.sum().backward()
    gradient = logits.grad
    assert gradient is not None and wide.grad is not None
    assert not gradient[:, vocab_size:].any()
    rounding = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(gradient[:, :vocab_size].double(), wide.grad, **rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_with_the_projection(dtype: torch.dtype) -> None:
    """bfloat16 operands, float32 accumulation: compared with the float64 product of the same rounded operands."""
    generator = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda", generator=generator).to(dtype)
    weight = (torch.randn(1024, HIDDEN, device="cuda", generator=generator) / 8).to(dtype)
    targets = torch.randint(0, 1000, (TOKENS,), device="cuda", generator=generator)
    found = policy_statistics(hidden, weight, targets, vocab_size=1000, temperature=TEMPERATURE)
    expected = reference_policy_statistics(hidden.double() @ weight[:1000].double().T, targets, TEMPERATURE)
    for name in ("log_prob", "entropy", "rest"):
        # float32 products on tensor cores may be TF32 where the caller allows it; by default torch does not.
        torch.testing.assert_close(getattr(found, name).double(), getattr(expected, name), rtol=1e-4, atol=1e-5)
