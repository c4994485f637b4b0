"""Stands in for flash_attn.cute.cache_utils."""


class JITCache(dict):
    """Keeps nothing: the library caches compiled kernels."""
