"""Triton kernels of this package. They need torch and triton, never SGLang."""
