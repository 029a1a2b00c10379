"""An LLM reinforcement-learning backend on Megatron-Core, vLLM and Ray with the Optimal Token Baseline."""

__version__ = "0.1.0"
