"""SLURM's lists of hosts and of tasks, with and without SLURM's own tool."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.errors import MeshError
from meshinfer.mesh.hostlist import expand_counts, expand_hosts, hostnames, node_address


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("single", ["single"]),
        ("linux[1,2]", ["linux1", "linux2"]),
        ("jean-zay-ia810", ["jean-zay-ia810"]),
        ("alpha,beta,gamma", ["alpha", "beta", "gamma"]),
        ("a,b[001,003],c", ["a", "b001", "b003", "c"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("d05-[41-42]", ["d05-41", "d05-42"]),
        ("rack[1-2]n[3-4]", ["rack1n3", "rack1n4", "rack2n3", "rack2n4"]),
        ("n[1-2,5]-ib0,x", ["n1-ib0", "n2-ib0", "n5-ib0", "x"]),
        ("n[3,0-1]", ["n3", "n0", "n1"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("[1-2]a", ["1a", "2a"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
        ("n[7]", ["n7"]),
    ],
)
def test_forms(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,,b", "a,", ",a", "n[1", "n1]", "n[]", "n[1,]", "n[1-]", "n[-1]", "n[a-b]"),
        *("n[1-2-3]", "n[3-1]", "n[1,[2]]", "a b", "n[1 2]", "n[1-2]]", "n[0-99999]", "n[x]"),
        "n[0-999][0-999]",
    ],
)
def test_other_forms_ask_for_the_address(text: str) -> None:
    with pytest.raises(MeshError, match=r"cannot expand the node list .*host= of init_mesh"):
        expand_hosts(text)


names = st.from_regex(r"[a-z]([a-z0-9.-]{0,5}[a-z.-])?", fullmatch=True)
numbers = st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(0, 4))


@st.composite
def lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A list as SLURM writes it, and its hosts, written out one by one."""
    texts, hosts = [], []
    for _ in range(draw(st.integers(1, 4))):
        text, named = "", [""]
        for _ in range(draw(st.integers(1, 3))):
            prefix, ranges, chosen = draw(names), [], []
            for first, more, width in draw(st.lists(numbers, max_size=3)):
                last = f"{first + more:0{width}d}"
                ranges.append(f"{first:0{width}d}-{last}" if more else last)
                # the width of the first number holds for the whole range
                fill = len(f"{first:0{width}d}")
                chosen += [f"{first + step:0{fill}d}" for step in range(more + 1)]
            text += prefix + (f"[{','.join(ranges)}]" if ranges else "")
            named = [head + prefix + tail for head in named for tail in chosen or [""]]
        texts.append(text)
        hosts += named
    return ",".join(texts), hosts


@given(lists())
def test_every_list_is_expanded_in_order(pair: tuple[str, list[str]]) -> None:
    text, hosts = pair
    assert expand_hosts(text) == hosts


@given(st.text("n1[]-,0 x", max_size=12))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except MeshError:
        return
    assert hosts
    assert all(hosts)
    assert not set("[], ") & set("".join(hosts))


@pytest.mark.parametrize(
    ("text", "counts"),
    [("3", [3]), ("2(x2),1", [2, 2, 1]), ("1,2(x3)", [1, 2, 2, 2]), ("2(x1)", [2])],
)
def test_counts(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x", "2,,1", "2(3)", "-1", "1(x99999999)"])
def test_other_counts_are_refused(text: str) -> None:
    with pytest.raises(MeshError, match=r"nodes?"):
        expand_counts(text)


# --- SLURM's own tool ----------------------------------------------------------------------------


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    path = folder / "scontrol"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder))


def test_the_tool_is_asked_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, monkeypatch, 'echo "$1-$2-$3"; echo second')
    assert hostnames("n[1-2]") == ["show-hostnames-n[1-2]", "second"]
    assert hostnames("n1") == ["n1"], "there is nothing to ask"


@pytest.mark.parametrize("body", ["exit 1", "true", None])
def test_lists_are_expanded_where_the_tool_is_no_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str | None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if body is not None:
        tool(tmp_path, monkeypatch, body)
    assert hostnames("n[08-09],x") == ["n08", "n09", "x"]
    assert node_address("n08") is None


def test_the_tool_does_not_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, monkeypatch, "echo n]")
    with pytest.raises(MeshError, match=r"'n\[1'.*host="):
        hostnames("n[1")


def test_the_address_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, monkeypatch, 'echo "NodeName=$3 Arch=x86"; echo "   NodeAddr=10.1.2.3 X=1"')
    assert node_address("n7") == "10.1.2.3"
