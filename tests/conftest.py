"""For all tests: one thread for torch, and hypothesis without deadlines (on CI with the same examples every time)."""

import os

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("grailnode", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("grailnode")
