"""The loop that trains, the driver that runs it on rank 0, and everything that needs both Megatron and the rollout engines."""
