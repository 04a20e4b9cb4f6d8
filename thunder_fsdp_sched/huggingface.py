"""Saving sharded models of Hugging Face's transformers and PEFT in their own format."""

from .extras.huggingface import save_pretrained

__all__ = ["save_pretrained"]
