"""Sampling with vLLM engines that run as Ray actors, and the transfer of new weights to them."""
