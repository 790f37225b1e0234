"""Lets a wheel's package `rl_platform` hold the modules of two folders: `api/` and the root of `platform/`.

All else is in pyproject.toml. `docs/architecture.md` says why there are two folders.
"""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPackage(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        if package == "rl_platform":
            modules += super().find_package_modules(package, "platform")
        return modules


setup(cmdclass={"build_py": BuildPackage})
