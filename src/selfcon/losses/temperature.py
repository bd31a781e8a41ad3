"""Temperatures: what can be one, and one that is learnt."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from selfcon.errors import UsageError

LEAST = 1e-6  # far below any use, far above where float32 overflows


class LearnedTemperature(nn.Module):
    """A temperature as a parameter: its logarithm, so that no step brings it to 0. Calling it gives the temperature."""

    def __init__(self, temperature: float, device: torch.device | None = None) -> None:
        super().__init__()
        start = check_number("temperature", temperature, least=LEAST)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(start), device=device))
        self.log_temperature.no_decay = True  # type: ignore[attr-defined]

    def forward(self) -> Tensor:
        return self.log_temperature.exp()

    def extra_repr(self) -> str:
        return f"{float(self().detach()):.4g}"


def check_temperature(temperature: float | Tensor) -> float | Tensor:
    """The temperature as a number or a tensor without dimensions; what cannot be one is refused.

    Looking at a tensor would make the host wait for a GPU: there, and in `torch.compile`, a wrong one becomes NaN.
    """
    if not isinstance(temperature, Tensor):
        return check_number("temperature", temperature, least=LEAST)
    if temperature.numel() != 1 or not temperature.is_floating_point():
        raise UsageError("A temperature that is a tensor must be one floating-point number.")
    temperature = temperature.reshape(())
    if temperature.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.where(temperature >= LEAST, temperature, torch.nan)
    check_number("temperature", float(temperature.detach()), least=LEAST)
    return temperature


def check_number(name: str, value: Any, *, least: float) -> float:
    """The value as a float, NumPy's included; refused where it is none, not finite or too small."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} must be a number, not {value!r}.")
    if not math.isfinite(value) or value < least:
        raise UsageError(f"{name} must be a finite number of at least {least}, not {value}.")
    return float(value)
