"""Conversations: the chat template of a policy's tokenizer, which `init` renders and no node of a run does."""
