"""The `openrl` command. Light: it can say what is missing before anything heavy is imported."""

from __future__ import annotations

import sys

_MISSING = """\
openrl's commands need the server extra, and {module} is not installed.
Install it from your clone of OpenRL:

    pip install -e ".[server]"

or let `make demo` make an environment. (The package that a registry calls openrl is another
project.)
"""

_EXTRA = {
    "click", "huggingface_hub", "msgspec", "peft", "google", "rich", "safetensors", "tokenizers",
    "torch", "transformers", "uvloop", "zstandard",
}  # fmt: skip


def main() -> None:
    try:
        from openrl.commands import cli

        cli()
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRA:
            raise
        sys.exit(_MISSING.format(module=module))


if __name__ == "__main__":  # python -m openrl.cli
    main()
