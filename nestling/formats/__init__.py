"""Number formats that checkpoints come in: where FP8 and NVFP4 keep codes and scales, and how they are cut."""

from __future__ import annotations

from nestling.formats.modelopt import SIDECAR
from nestling.formats.quantized import Quantized, detect

__all__ = ["SIDECAR", "Quantized", "detect"]
