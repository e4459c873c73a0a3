"""Register with timm and transformers when both packages are imported, without importing them for their own sake.

timm has no entry points for other packages: a model exists once its module is imported. transformers has none either:
an attention exists once it is registered. If such a package is here already, our module for it is imported at once. If
it is not, an import hook waits for it and imports our module right after it, so that `import inline_attention; import
timm` works like the other order.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

# Modules of other packages, and our modules that register something with them when they are imported.
OUR_MODULES = {
    "timm.models": "inline_attention.models",
    "transformers.modeling_utils": "inline_attention.layers.transformers_attention",
}


def install() -> None:
    """Register with the packages that are imported now, and with the others when they are."""
    for theirs, ours in OUR_MODULES.items():
        if theirs not in sys.modules:
            if not any(isinstance(finder, _RegisterAfter) and finder.theirs == theirs for finder in sys.meta_path):
                sys.meta_path.insert(0, _RegisterAfter(theirs))
        elif ours not in sys.modules:  # nor being imported, in this thread or another
            import_module(ours)


class _RegisterAfter:
    """Finds a module where the other finders find it, and imports ours once it is executed.

    Python holds the module's lock meanwhile: other threads that import it wait until ours is there.
    """

    def __init__(self, theirs: str) -> None:
        self.theirs = theirs

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return the spec of the module that is waited for, None for others."""
        if fullname != self.theirs:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == self.theirs and self in sys.meta_path:  # a loader of a zip file has many modules
                    sys.meta_path.remove(self)
                    _register(self.theirs)

            spec.loader.exec_module = execute_and_register
        return spec


def _register(theirs: str) -> None:
    try:
        import_module(OUR_MODULES[theirs])
    except ImportError as error:  # `import timm` must not fail because of us
        package = theirs.partition(".")[0]
        warnings.warn(f"InLine attention is not registered with {package}: {error}", RuntimeWarning, stacklevel=2)
