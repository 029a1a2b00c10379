"""Megatron-Core: the only package that imports `megatron`. Importing it prepares the platform first."""

from otb_megatron.mcore.platform import prepare

prepare()
