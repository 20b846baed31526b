"""The folder formats of a speculator, by the names of the settings; each is a file of its own."""

from __future__ import annotations

from typing import Literal

from trainer.export.base import Format, Serving
from trainer.export.deepspec import DeepSpec
from trainer.export.layout import Layout
from trainer.export.native import Native
from trainer.export.sglang import Sglang
from trainer.export.speculators import Speculators
from trainer.export.stitched import Changes, Stitched
from trainer.export.zlab import ZLab

__all__ = ["FORMATS", "LAYOUTS", "Format", "FormatName", "Serving"]

FormatName = Literal["speculators", "native", "zlab", "deepspec", "sglang", "stitched", "changes"]
OWN = Speculators(), Native(), ZLab(), DeepSpec(), Sglang()
LAYOUTS: dict[str, Layout] = {form.name: form for form in OWN}  # of drafters in folders of their own
FORMATS: dict[str, Format] = {**LAYOUTS, **{form.name: form for form in (Stitched(), Changes())}}
