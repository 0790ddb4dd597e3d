"""What leaves the server encrypted can be read by its recipient, whole, or is not there."""

import subprocess
import sys
from pathlib import Path

import pyrage

from openrl.encryption import encrypt_files

_ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from openrl.encryption import encrypt_files

resource.setrlimit(resource.RLIMIT_FSIZE, (150, resource.RLIM_INFINITY))
try:
    encrypt_files(Path(sys.argv[1]), [sys.argv[2]])
except OSError as error:
    print("cannot be written:", error)
"""


def test_the_recipient_reads_what_was_there(tmp_path: Path) -> None:
    identity = pyrage.x25519.Identity.generate()
    (tmp_path / "adapter").write_bytes(bytes(200_000))
    encrypt_files(tmp_path, [str(identity.to_public())])
    assert [file.name for file in tmp_path.iterdir()] == ["adapter.age"]
    assert pyrage.decrypt((tmp_path / "adapter.age").read_bytes(), [identity]) == bytes(200_000)


def test_an_output_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """Even a small one, which is written with the last flush."""
    (tmp_path / "adapter").write_bytes(b"small")
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    command = [sys.executable, "-c", _ON_A_FULL_DISK, str(tmp_path), recipient]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "cannot be written" in said
    assert (tmp_path / "adapter").read_bytes() == b"small"
