"""Register the models with timm when both packages are imported, without importing timm for its own sake.

timm has no entry points for other packages: a model exists once its module is imported. If timm is here already, our
models are imported at once. If it is not, an import hook waits for `timm.models` and imports them right after it, so
that `import inline_attention; import timm` works like the other order.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

TIMM_MODELS = "timm.models"
OUR_MODELS = "inline_attention.models"


def install() -> None:
    """Register the models now if timm is imported, otherwise when it is."""
    if TIMM_MODELS not in sys.modules:
        if not any(isinstance(finder, _RegisterAfterTimm) for finder in sys.meta_path):
            sys.meta_path.insert(0, _RegisterAfterTimm())
    elif OUR_MODELS not in sys.modules:  # nor being imported, in this thread or another
        import_module(OUR_MODELS)


class _RegisterAfterTimm:
    """Finds `timm.models` where the other finders find it, and imports our models once it is executed.

    Python holds the lock of `timm.models` meanwhile: other threads that import timm wait until the models are there.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return the spec of `timm.models`, None for other modules."""
        if fullname != TIMM_MODELS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == TIMM_MODELS and self in sys.meta_path:  # a loader of a zip file has many modules
                    sys.meta_path.remove(self)
                    _register()

            spec.loader.exec_module = execute_and_register
        return spec


def _register() -> None:
    try:
        import_module(OUR_MODELS)
    except ImportError as error:  # `import timm` must not fail because of us
        warnings.warn(f"the InLine models are not registered with timm: {error}", RuntimeWarning, stacklevel=2)
