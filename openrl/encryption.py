"""Files encrypted with age (https://age-encryption.org), for weights that leave the server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyrage

from openrl.errors import UserError

SUFFIX = ".age"


def check_recipients(texts: Sequence[str]) -> tuple[str, ...]:
    """Raises `UserError` for what is no age recipient."""
    for number, text in enumerate(texts):
        _recipient(number, text)
    return tuple(texts)


def encrypt_files(directory: Path, recipients: Sequence[str]) -> None:
    """Every file of the directory, each under its name with `.age`; what was plain is removed.
    Raises `OSError` for what cannot be written."""
    parsed = [_recipient(number, text) for number, text in enumerate(recipients)]
    for file in sorted(directory.iterdir()):
        # Not `encrypt_file`: on a full disk that one loses the end of its output without a word.
        with file.open("rb") as plain, Path(f"{file}{SUFFIX}").open("wb") as sealed:
            pyrage.encrypt_io(plain, sealed, parsed)
        file.unlink()


def _recipient(number: int, text: str) -> Any:
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(text)
    except pyrage.RecipientError as error:
        raise UserError(
            f"age_encryption_recipients[{number}] is no age public key (age1… or ssh-…): {error}"
        ) from error
