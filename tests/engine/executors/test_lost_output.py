"""Output that nobody reads, or that nothing more fits into, is lost, and nothing else is."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from forkmerge.engine.executors.lost_output import TolerantFile, lost_output, tolerant


def test_what_can_be_written_is_written(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w", encoding="utf-8") as file:
        file.write("before ")
        stream = tolerant(file)
        stream.write("λ\n")
        assert lost_output(stream) is None
    assert (tmp_path / "file").read_text("utf-8") == "before λ\n"


def test_a_pipe_without_a_reader_takes_everything_and_is_remembered() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = io.TextIOWrapper(io.BufferedWriter(TolerantFile(writer, "w")))
    stream.write("x" * 100_000)
    stream.flush()
    stream.write("more")
    lost = lost_output(stream)
    assert lost is not None
    assert lost.errno == errno.EPIPE
    stream.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_so_does_a_full_disk() -> None:
    with open("/dev/full", "w", encoding="utf-8") as file:
        stream = tolerant(file)
        stream.write("x")
        lost = lost_output(stream)
    assert lost is not None
    assert lost.errno == errno.ENOSPC


def test_a_stream_that_is_no_file_is_left_as_it_is() -> None:
    stream = io.StringIO()
    assert tolerant(stream) is stream
    assert lost_output(stream) is None
    assert lost_output(None) is None


def test_a_stream_that_holds_nothing_back_goes_on_to_do_so(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb", buffering=0) as raw:
        unbuffered = io.TextIOWrapper(raw, write_through=True)  # type: ignore[arg-type]  # as PYTHONUNBUFFERED makes it
        same = tolerant(unbuffered)
        same.write("seen at once, without a newline")
        assert (tmp_path / "out").read_text() == "seen at once, without a newline"
        unbuffered.detach()
