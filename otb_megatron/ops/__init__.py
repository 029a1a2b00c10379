"""Tensors and an explicit process group in, tensors out: the policy statistics head and the context-parallel index maths."""
