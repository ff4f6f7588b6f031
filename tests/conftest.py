"""One thread per test process: the suite runs one process per core."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
