"""Speculator Trainer: trains drafters for speculative decoding and exports them as vLLM loads them."""

__version__ = "0.1.0"
