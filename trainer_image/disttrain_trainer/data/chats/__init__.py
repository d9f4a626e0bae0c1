"""Conversations: lines of files, and their tokens by a tokenizer's chat template."""
