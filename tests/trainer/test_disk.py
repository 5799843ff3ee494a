"""Checksums of files that are read in several pieces."""

from __future__ import annotations

import zlib

from trl_stppo.trainer.disk import disk


def test_every_piece_of_a_file_is_in_its_checksum(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_BLOCK", 4)
    contents = [b"", b"four", b"more than four", b"less than four"]
    paths = [tmp_path / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    assert disk.checksums(paths) == [f"{zlib.crc32(content):08x}" for content in contents]
