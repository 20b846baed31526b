"""A part of the build (pyproject.toml) and no command: puts `conf/` and `recipes/` into the wheel, as
`trainer/conf/` and `trainer/conf/recipe/`.

They lie at the top of the checkout, where people look for them, outside the package, where setuptools looks.
Every file in them travels, so that a new configuration group needs no list to be kept. An editable
installation reads them from the checkout.
"""

import shutil
from pathlib import Path

from setuptools.command.build_py import build_py

FOLDERS = {"conf": "trainer/conf", "recipes": "trainer/conf/recipe"}  # in the checkout, in the wheel


def configuration_files() -> dict[str, str]:
    """File in the checkout -> its place in the wheel."""
    found = {}
    for source, target in FOLDERS.items():
        for file in sorted(Path(source).rglob("*")):
            if file.is_file() and not any(part.startswith((".", "__")) for part in file.parts):
                found[str(file)] = str(target / file.relative_to(source))
    return found


class BuildPy(build_py):
    """`build_py` that also copies the configuration and names it for the source distribution."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        shutil.rmtree(Path(self.build_lib, "trainer", "conf"), ignore_errors=True)  # of an earlier build
        for source, target in configuration_files().items():
            place = Path(self.build_lib) / target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *configuration_files(), "tools/wheel_layout.py"]
