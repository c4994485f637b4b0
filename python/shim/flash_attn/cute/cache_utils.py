"""Stands in for flash_attn.cute.cache_utils."""


class JITCache(dict):
    """Nothing is kept here: compiled kernels are the library's."""
