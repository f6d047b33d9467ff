from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.checkpoint import MANIFEST, METADATA
from holdfast.checkpoint.manifest import File, Manifest, Merge, Origin, Part, listed, merge, part_directory
from holdfast.errors import CheckpointDamaged, CheckpointError
from holdfast.plain import Plain
from holdfast.sealed import seal, unseal

names = st.text(string.ascii_letters + "._- éß\n\\\"'", min_size=1, max_size=8).filter(lambda name: name.strip("."))
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
files = st.builds(File, paths, st.integers(0, 2**62), st.text("0123456789abcdef", max_size=32), st.integers(0, 2**62))
parts = st.builds(Part, st.lists(files, max_size=5).map(tuple), st.lists(paths, max_size=3).map(tuple), st.text())
metrics = st.dictionaries(st.text(), st.floats(allow_nan=False) | st.integers() | st.text(), max_size=3)
origins = st.builds(Origin, st.text(), *[st.integers(0, 1000)] * 3)
manifests = st.builds(
    Manifest,
    st.integers(0, 10**7),
    origins,
    st.lists(files, max_size=5).map(tuple),
    st.lists(paths, max_size=3).map(tuple),
    metrics,
    st.floats(0, 1e10),
)

SAMPLE = Manifest(7, Origin("mnist", 1, 2, 3), (File("a/model.pt", 12, "0" * 32),), ("empty",), {"loss": 0.5}, 1.5)
LEAVES_THE_DIRECTORY = ["../x", "/etc/passwd", "a/../../x", "a//b", ".", "..", "", "a/", "./a", "a\0b"]
NO_PATHS: list[Plain] = [None, 5, ["a"], {"a": 1}]


def changed(line: bytes, **changes: Plain) -> bytes:
    return seal({**unseal(line), **changes})


# Round trips


@given(parts)
def test_a_part_is_read_as_it_was_written(part: Part) -> None:
    assert Part.unseal(part.seal()) == part


@given(manifests)
def test_a_manifest_is_read_as_it_was_written(manifest: Manifest) -> None:
    read = Manifest.unseal(manifest.seal(), "here")
    assert read == manifest
    assert read.origin.experiment == manifest.origin.experiment


def test_a_manifest_counts_its_bytes() -> None:
    assert SAMPLE.size_bytes == 12
    assert Part(SAMPLE.files).size_bytes == 12


# What is refused


def test_every_byte_of_a_manifest_that_is_flipped_or_cut_is_detected() -> None:
    line = SAMPLE.seal()
    for position in range(len(line)):
        for wrong in (line[:position], line[:position] + bytes([line[position] ^ 1]) + line[position + 1 :]):
            with pytest.raises(CheckpointDamaged, match="the manifest of checkpoint_000007 cannot be read"):
                Manifest.unseal(wrong, "checkpoint_000007")


@pytest.mark.parametrize("path", [*LEAVES_THE_DIRECTORY, *NO_PATHS])
def test_a_path_that_leaves_the_directory_is_refused(path: Plain) -> None:
    row = [path, 1, "0" * 32]
    for wrong in ({"files": [row]}, {"directories": [path]}):
        with pytest.raises(CheckpointDamaged):
            Manifest.unseal(changed(SAMPLE.seal(), **wrong), "checkpoint_000007")
        with pytest.raises(ValueError):
            Part.unseal(changed(Part(()).seal(), **wrong))


@pytest.mark.parametrize("version", [0, 2, "1.1", None])
def test_an_unknown_format_is_no_damage_and_refused_with_what_to_do(version: Plain) -> None:
    line = changed(SAMPLE.seal(), version=version)
    with pytest.raises(
        CheckpointError, match=r"checkpoint_000007 was written by a newer holdfast: .*reads format 1"
    ) as it:
        Manifest.unseal(line, "checkpoint_000007")
    assert not isinstance(it.value, CheckpointDamaged)
    with pytest.raises(ValueError, match=f"of format {version!r}, .* reads format 1: use the version that wrote it"):
        Part.unseal(line)


NONSENSE: list[Any] = [
    None,
    7,
    [],
    "text",
    {},
    {"version": 1},
    {**unseal(SAMPLE.seal()), "number": None},
    {**unseal(SAMPLE.seal()), "number": float("inf")},
    {**unseal(SAMPLE.seal()), "origin": {"experiment": "mnist"}},
    {**unseal(SAMPLE.seal()), "origin": {**vars(SAMPLE.origin), "more": 1}},
    {**unseal(SAMPLE.seal()), "files": 5},
    {**unseal(SAMPLE.seal()), "files": [5]},
    {**unseal(SAMPLE.seal()), "files": [["a"]]},
    {**unseal(SAMPLE.seal()), "files": [["a", "b", "c"]]},
    {**unseal(SAMPLE.seal()), "files": [["a", 1, "c", 2, 3]]},
    {**unseal(SAMPLE.seal()), "metrics": 5},
    {**unseal(SAMPLE.seal()), "time": []},
]


@pytest.mark.parametrize("value", NONSENSE, ids=range(len(NONSENSE)))
def test_a_whole_line_that_is_no_manifest_is_damage_and_no_crash(value: Plain) -> None:
    with pytest.raises(CheckpointDamaged, match="checkpoint_000007"):
        Manifest.unseal(seal(value), "checkpoint_000007")


# What is listed


def test_what_is_listed_has_no_times_and_neither_manifest_nor_notes() -> None:
    given_files = [
        File("a", 1, "x", 99),
        File(MANIFEST, 1, "x"),
        File(METADATA, 2, "y"),
        File(f"deep/{METADATA}", 3, "z"),
    ]
    assert listed(given_files) == (File("a", 1, "x"), File(f"deep/{METADATA}", 3, "z"))


def test_parts_lie_by_report_and_rank(tmp_path: Any) -> None:
    assert part_directory(tmp_path, 3, 1) == tmp_path / "3" / "1"


# Merging


def part(*paths: str, directories: tuple[str, ...] = (), **contents: str) -> Part:
    """A part with a file for each path; its hash is the path, or for `path=text` the text."""
    rows = {**{path: path for path in paths}, **contents}
    return Part(tuple(File(path, len(text), text) for path, text in rows.items()), directories)


def owners(merged: Merge) -> dict[str, int]:
    return {path: rank for path, (rank, _) in merged.files.items()}


def test_different_files_are_all_there() -> None:
    merged = merge({1: part("rank1.pt", "shared/b"), 0: part("rank0.pt", "shared/a")})
    assert owners(merged) == {"rank0.pt": 0, "shared/a": 0, "rank1.pt": 1, "shared/b": 1}
    assert merged.conflicts == ()


def test_the_same_bytes_from_several_ranks_are_one_file() -> None:
    merged = merge({rank: part("config.json") for rank in range(4)})
    assert owners(merged) == {"config.json": 0}
    assert merged.conflicts == ()


def test_of_different_bytes_the_lowest_ranks_are_kept_and_each_other_is_named() -> None:
    merged = merge({5: part(model="five"), 2: part(model="two"), 3: part(model="three")})
    assert owners(merged) == {"model": 2}
    assert merged.conflicts == (
        "model: rank 2's was kept, rank 3's is different and was dropped",
        "model: rank 2's was kept, rank 5's is different and was dropped",
    )


def test_same_hash_but_another_size_is_a_conflict() -> None:
    assert merge({0: Part((File("a", 1, "x"),)), 1: Part((File("a", 2, "x"),))}).conflicts


def test_a_file_where_a_lower_rank_has_a_folder_is_dropped_and_named() -> None:
    merged = merge({0: part("model/weights"), 1: part("model")})
    assert owners(merged) == {"model/weights": 0}
    assert merged.conflicts == ("model: rank 0's was kept, rank 1's is different and was dropped",)


def test_a_file_below_a_lower_ranks_file_is_dropped_and_named() -> None:
    merged = merge({0: part("model"), 1: part("model/deep/weights")})
    assert owners(merged) == {"model": 0}
    assert merged.conflicts == ("model/deep/weights: rank 0's was kept, rank 1's is different and was dropped",)


def test_a_file_where_a_lower_rank_has_an_empty_folder_is_dropped_and_named() -> None:
    merged = merge({0: part(directories=("model",)), 1: part("model")})
    assert (owners(merged), merged.directories) == ({}, ("model",))
    assert merged.conflicts == ("model: rank 0's was kept, rank 1's is different and was dropped",)


def test_an_empty_folder_where_a_lower_rank_has_a_file_is_dropped_and_named() -> None:
    for folder in ("model", "model/deep"):
        merged = merge({0: part("model"), 1: part(directories=(folder,))})
        assert (owners(merged), merged.directories) == ({"model": 0}, ())
        assert merged.conflicts == (f"{folder}: rank 0's was kept, rank 1's is different and was dropped",)


def test_a_folder_is_empty_only_if_no_rank_put_something_in() -> None:
    merged = merge({0: part(directories=("a", "b")), 1: part("a/file", directories=("b", "c/d"))})
    assert merged.directories == ("b", "c/d")
    assert merged.conflicts == ()
    assert merge({0: part(directories=("a",)), 1: part(directories=("a/b",))}).directories == ("a/b",)


def test_the_notes_of_the_lowest_rank_are_carried_and_no_conflict() -> None:
    notes = {METADATA: "zero"}
    merged = merge({0: part(**notes), 1: part(**{METADATA: "one"})})
    assert owners(merged) == {METADATA: 0}
    assert merged.conflicts == ()
    assert owners(merge({0: part("a"), 1: part(**notes)})) == {"a": 0, METADATA: 1}


small_paths = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)


@st.composite
def small_parts(draw: st.DrawFn) -> Part:
    """Parts as directories are: no file is also a folder, and what is listed as empty is."""
    kept: dict[str, str | None] = {}
    for path in draw(st.lists(small_paths, max_size=5)):
        if not any(path == other or path.startswith(other + "/") or other.startswith(path + "/") for other in kept):
            kept[path] = draw(st.sampled_from(["x", "yy", None]))
    rows = tuple(File(path, len(text), text) for path, text in kept.items() if text is not None)
    return Part(rows, tuple(path for path, text in kept.items() if text is None))


@given(st.dictionaries(st.integers(0, 5), small_parts(), min_size=1, max_size=4))
def test_a_merge_is_a_directory_that_can_be_made_and_the_lowest_rank_loses_nothing(
    given_parts: dict[int, Part],
) -> None:
    merged = merge(given_parts)
    everything = [*merged.files, *merged.directories]
    assert len(set(everything)) == len(everything)
    for path in everything:
        assert not any(other.startswith(path + "/") for other in everything)
    lowest = given_parts[min(given_parts)]
    assert all(merged.files[file.path] == (min(given_parts), file) for file in lowest.files)
    for rank, one in given_parts.items():
        for file in one.files:
            owner = merged.files.get(file.path)
            named = any(f"rank {rank}'s is different" in line for line in merged.conflicts)
            assert named or (owner is not None and (owner[1].size_bytes, owner[1].hash) == (file.size_bytes, file.hash))
