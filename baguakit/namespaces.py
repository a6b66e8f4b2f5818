"""Public namespaces: `dir()`, and with it completion by TAB, shows their public names and nothing else."""

from types import ModuleType


def show_public(module: ModuleType) -> None:
    """Let `dir()` of a module, and of the modules that it exports, show `__all__` and the names between underscores."""

    def names() -> list[str]:
        return sorted({*module.__all__, *(name for name in vars(module) if name.startswith("__"))})

    vars(module)["__dir__"] = names
    for name in module.__all__:
        if isinstance(inner := vars(module).get(name), ModuleType):
            show_public(inner)
