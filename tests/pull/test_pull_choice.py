"""Which files `REPO[:FILE]` means."""

from __future__ import annotations

import pytest

from s2moe.server.pull.choice import RemoteFile, choose, models_of
from s2moe.server.pull.errors import NoSuchFileError

REPO = "acme/moe-GGUF"


def files(*paths: str) -> list[RemoteFile]:
    """Files of 1, 2, 3 … GB."""
    return [RemoteFile(path, (index + 1) * 10**9, "0" * 64) for index, path in enumerate(paths)]


QUANTISED = files(
    "README.md",
    "moe-Q2_K.gguf",
    "moe-IQ4_XS.gguf",
    "moe-Q4_K_S.gguf",
    "moe-Q4_K_M.gguf",
    "moe-UD-Q4_K_M.gguf",
    "moe-Q8_0.gguf",
    "BF16/moe-BF16-00002-of-00002.gguf",
    "BF16/moe-BF16-00001-of-00002.gguf",
    "mmproj-moe-F16.gguf",
    "eagle3-moe-Q8_0.gguf",
    "moe.imatrix.gguf",
)


def chosen(wanted: str | None, listing: list[RemoteFile] = QUANTISED) -> list[str]:
    return [part.path for part in choose(listing, wanted, REPO).parts]


def refusal(wanted: str | None, listing: list[RemoteFile] = QUANTISED) -> str:
    with pytest.raises(NoSuchFileError) as caught:
        choose(listing, wanted, REPO)
    assert "\n" not in str(caught.value)
    assert REPO in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "path"),
    [
        ("Q4_K_M", "moe-Q4_K_M.gguf"),
        ("q4_k_m", "moe-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "moe-UD-Q4_K_M.gguf"),
        ("IQ4_XS", "moe-IQ4_XS.gguf"),
        ("moe-Q2_K.gguf", "moe-Q2_K.gguf"),
        ("Q8_0", "moe-Q8_0.gguf"),
        # by its whole name also what is no model
        ("mmproj-moe-F16.gguf", "mmproj-moe-F16.gguf"),
    ],
)
def test_file_or_quantisation_is_found(wanted: str, path: str) -> None:
    assert chosen(wanted) == [path]


@pytest.mark.parametrize("name", ["moe.Q4_K_M.gguf", "moe-q4_k_m.gguf", "Q4_K_M/moe-Q4_K_M.gguf"])
def test_quantisation_is_found_however_the_repo_writes_it(name: str) -> None:
    assert chosen("Q4_K_M", files(name, "moe.Q4_K_S.gguf")) == [name]


@pytest.mark.parametrize(
    "wanted",
    [
        "BF16",
        "moe-BF16-00001-of-00002.gguf",
        "moe-BF16-00002-of-00002.gguf",
        "BF16/moe-BF16-00001-of-00002.gguf",
    ],
)
def test_split_model_is_all_its_parts_in_order(wanted: str) -> None:
    assert chosen(wanted) == ["BF16/moe-BF16-00001-of-00002.gguf", "BF16/moe-BF16-00002-of-00002.gguf"]


def split(count: int, *indices: int) -> list[str]:
    return [f"m-BF16-{index:05}-of-{count:05}.gguf" for index in indices]


@pytest.mark.parametrize(
    ("count", "indices", "lacking"),
    [
        (3, (1, 3), (2,)),
        (3, (2, 3), (1,)),
        (3, (1,), (2, 3)),
        # as many as there should be, and yet not those
        (3, (1, 2, 4), (3,)),
        (2, (0, 1), (2,)),
    ],
)
def test_split_model_with_a_part_missing_is_refused_by_its_name(
    count: int, indices: tuple[int, ...], lacking: tuple[int, ...]
) -> None:
    error = refusal("BF16", files(*split(count, *indices), "m-Q8_0.gguf"))
    assert f"{count} parts" in error
    assert f"lacks {', '.join(split(count, *lacking))};" in error
    assert "other models of it: Q8_0 (" in error


def test_not_all_of_many_missing_parts_are_named() -> None:
    error = refusal("BF16", files(*split(99, 1)))
    assert f"lacks {', '.join(split(99, 2, 3, 4))} and 95 more;" in error
    assert error.endswith("other models of it: none")


@pytest.mark.parametrize(("count", "indices", "odd"), [(2, (1, 2, 3), 3), (2, (0, 1, 2), 0), (0, (1,), 1)])
def test_split_model_with_a_part_too_many_is_refused(count: int, indices: tuple[int, ...], odd: int) -> None:
    assert f"has beside them {split(count, odd)[0]};" in refusal("BF16", files(*split(count, *indices)))


def test_nothing_named_takes_the_only_model_and_else_q4_k_m() -> None:
    assert chosen(None, files("README.md", "moe-MXFP4.gguf", "mmproj-F16.gguf")) == ["moe-MXFP4.gguf"]
    assert chosen(None) == ["moe-Q4_K_M.gguf"]


def test_nothing_named_and_no_default_lists_what_there_is() -> None:
    error = refusal(None, files("moe-Q2_K.gguf", "moe-Q8_0.gguf"))
    assert f"{REPO}:NAME" in error
    assert "Q2_K (1.00 GB), Q8_0 (2.00 GB)" in error


def test_unknown_file_lists_what_there_is() -> None:
    error = refusal("Q5_K_M")
    assert "no Q5_K_M" in error
    assert "Q2_K (2.00 GB), IQ4_XS (3.00 GB)" in error
    assert "mmproj" not in error
    assert "Q5_K_M.gguf" in refusal("moe-Q5_K_M.gguf")


def test_part_of_a_quantisation_is_not_one() -> None:
    assert "no Q4_K;" in refusal("Q4_K")
    assert "no Q4_XS;" in refusal("Q4_XS")


def test_ambiguous_name_lists_the_files() -> None:
    listing = files("a-IQ3_S-2.7bpw.gguf", "a-IQ3_S-3.0bpw.gguf", "a-Q8_0.gguf")
    error = refusal("IQ3_S", listing)
    assert "a-IQ3_S-2.7bpw.gguf, a-IQ3_S-3.0bpw.gguf" in error
    assert "Q8_0" not in error
    # what two share tells nothing, so that the list has whole names
    assert "a-IQ3_S-2.7bpw.gguf (1.00 GB)" in refusal("Q2_K", listing)


def test_repo_without_gguf_is_refused() -> None:
    assert "no GGUF" in refusal(None, files("model.safetensors"))


def test_size_of_a_split_model_is_that_of_its_parts() -> None:
    (model,) = models_of(files("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"))
    assert (model.size_bytes, model.n_parts) == (3 * 10**9, 2)
