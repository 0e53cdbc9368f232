"""Text becomes blocks of bytes, each used once with the next byte as target; unusable files are refused."""

import math

import numpy as np
import pytest
import torch

from kfuse.data import DataError, load_text
from kfuse.data.text import STDLIB_BYTES, TextBlocks, stdlib_source, unigram_entropy


def write(folder, content):
    file = folder / "text.txt"
    file.write_bytes(content)
    return file


def test_blocks_are_contiguous_and_targets_are_the_next_bytes():
    tokens = np.arange(22, dtype=np.uint8)
    data = TextBlocks(tokens, 5)
    assert len(data) == 4
    x, y = data.fetch(np.array([3, 0]))
    assert x.dtype == y.dtype == torch.int64
    assert x.tolist() == [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]]
    assert torch.equal(y, x + 1)
    assert x.is_contiguous() and y.is_contiguous()


def test_a_block_counts_only_with_its_last_target():
    for length, blocks in [(4, 0), (5, 0), (6, 1), (10, 1), (11, 2)]:
        data = TextBlocks(np.zeros(length, dtype=np.uint8), 5)
        assert len(data) == blocks
        assert data.fetch(np.arange(blocks))[1].shape == (blocks, 5)


def test_a_file_is_split_at_its_last_tenth(tmp_path):
    text = ("Ein Stück Text, über zwölf Bytes. " * 40).encode()
    split = load_text(write(tmp_path, text), block_size=8)
    assert split.train.tokens.tobytes() + split.heldout.tokens.tobytes() == text
    assert len(split.heldout.tokens) == round(len(text) / 10)
    assert split.spec["vocab_size"] == 256
    assert split.spec["block_size"] == 8
    assert split.spec["unigram_entropy"] == unigram_entropy(split.heldout.tokens)
    x, _ = split.train.fetch(np.arange(2))
    assert bytes(x.flatten().tolist()) == text[:16]


def test_unigram_entropy_known_answers():
    assert unigram_entropy(np.zeros(7, dtype=np.uint8)) == 0.0
    assert unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(math.log(256))
    skewed = np.array([1, 1, 1, 2], dtype=np.uint8)
    assert unigram_entropy(skewed) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def test_the_default_is_the_standard_library():
    split = load_text()
    assert len(split.train.tokens) + len(split.heldout.tokens) == STDLIB_BYTES
    assert 2.5 < split.spec["unigram_entropy"] < 4.0
    source = stdlib_source(20_000)
    assert source == split.train.tokens[:20_000].tobytes()
    assert b"def " in source


def test_the_standard_library_without_source_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="no source of the standard library"):
        load_text()


def test_the_standard_library_skips_tests_and_installed_packages(tmp_path, monkeypatch):
    for name in ["b/x.py", "a.py", "test/t.py", "site-packages/p.py", "b/tests/u.py", "b/notes.txt", "c.py"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name + "\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert stdlib_source() == b"a.py\nb/x.py\nc.py\n"
    assert stdlib_source(limit=7) == b"a.py\nb/"


def test_unusable_files_are_one_clear_error(tmp_path):
    for content, message in [
        (b"", "is empty"),
        (b"short", "too short.*5 bytes.*block_size=64 needs at least 65"),
        (b"x" * 300, "too short.*270 to train on and 30 held out"),
        (b"x" * 700 + b"\xff" + b"x" * 700, "not UTF-8: byte 0xff at offset 700"),
        (("é" * 700).encode()[:-1], "not UTF-8: byte 0xc3 at offset 1398"),
    ]:
        file = write(tmp_path, content)
        with pytest.raises(DataError, match=message) as caught:
            load_text(file)
        assert str(file) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_text(tmp_path / "missing.txt")
    with pytest.raises(DataError, match="is a folder"):
        load_text(str(tmp_path))


def test_the_shortest_usable_file(tmp_path):
    split = load_text(write(tmp_path, b"x" * 650), block_size=64)
    assert len(split.heldout) == 1
    with pytest.raises(DataError, match="too short"):
        load_text(write(tmp_path, b"x" * 644), block_size=64)


def test_arguments_out_of_range():
    with pytest.raises(DataError, match="block_size=0"):
        load_text(block_size=0)
    with pytest.raises(DataError, match=r"heldout=1\.5"):
        load_text(heldout=1.5)
