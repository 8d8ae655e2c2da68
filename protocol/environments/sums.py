"""The sums environment: one-digit addition as a question to a chat model (docs/spec/environments.md)."""

from protocol.environments.addition import Addition


class Sums(Addition):
    """One-digit addition, asked as 'What is 3+9?'. The reward is that of `Addition`."""

    name = "sums"
    form = "What is {}+{}?"
    low, high = 1, 9
