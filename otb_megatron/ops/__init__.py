"""Tensors and an explicit process group in, tensors out: the policy statistics head, context-parallel index maths, the sketch of long vectors."""
