"""The packages of the extra `train`, asked for where they are used."""

from __future__ import annotations

from importlib.util import find_spec

from understudy.errors import ConfigError

BASIC = ("torch", "transformers")
FULL = (*BASIC, "accelerate", "datasets", "peft", "trl")


def require_packages(*modules: str) -> None:
    """Raise ConfigError where one of these modules (default: those that training stands on) is not installed."""
    missing = [module for module in modules or BASIC if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"this needs {_listed(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; install "
            "what training needs: pip install 'understudy[train]'"
        )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
