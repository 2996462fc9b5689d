"""Stores the bytecode of changed modules before the processes of a run load them.

pytest rewrites the assertions of a test module when it loads it, and stores the bytecode. All processes of a run load
the same modules at the same time: without this, each of them would rewrite and compile all that changed.
"""

import os
import sys
from compileall import compile_file
from contextlib import suppress
from fnmatch import fnmatch
from importlib.util import find_spec, module_from_spec
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_REWRITTEN = ("test_*.py", "conftest.py")


def store_bytecode() -> None:
    """Compile the modules that changed, in a child process for each core."""
    if sys.dont_write_bytecode:
        return
    changed = [path for folder in ("src", "tests") for path in (_ROOT / folder).rglob("*.py") if _is_changed(path)]
    cores = os.cpu_count() or 1
    children = [_compile_in_child(share) for n in range(cores) if (share := changed[n::cores])]
    for child in children:
        os.waitpid(child, 0)


def _is_changed(path: Path) -> bool:
    stored = path.parent.glob(f"__pycache__/{path.stem}.{'*-pytest-*.' if _is_rewritten(path) else '*'}pyc")
    return all(each.stat().st_mtime < path.stat().st_mtime for each in stored)


def _is_rewritten(path: Path) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in _REWRITTEN)


def _compile_in_child(paths: list[Path]) -> int:
    """Return the process that compiles the modules. What cannot be compiled is reported when it is collected."""
    child = os.fork()
    if child == 0:
        for path in paths:
            with suppress(BaseException):
                _store(path)
        os._exit(0)
    return child


def _store(path: Path) -> None:
    if _is_rewritten(path):
        _rewrite(path)
    else:
        compile_file(path, quiet=2)


def _rewrite(path: Path) -> None:
    """Let pytest's loader store a module, and end it at its first import, which nothing can do without builtins."""
    spec = find_spec(".".join(path.relative_to(_ROOT).with_suffix("").parts))
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        vars(module)["__builtins__"] = {}
        spec.loader.exec_module(module)
