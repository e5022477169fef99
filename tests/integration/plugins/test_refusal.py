"""A user's mistake that shows only once the tests are collected is named, alone and under xdist."""

from __future__ import annotations

import pytest

MISTAKES = {
    "gate": ("import pytest\n@pytest.mark.gpus('two')\ndef test_it(): pass", (), "gpus takes one whole number"),
    "issue": ("import pytest\n@pytest.mark.known_issue('X1')\ndef test_it(): pass", (), "known_issue takes the id"),
    "adapter": ("def test_it(): pass", ("--canary", "nothing_like_it"), "no adapter 'nothing_like_it'"),
    "check": ("def test_it(): pass", ("canary[reference]::kl.unheard_of",), "name its adapter with --canary=ADAPTER"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_session_ends_with_one_line_and_exit_code_2(pytester: pytest.Pytester, mistake: str) -> None:
    source, arguments, told = MISTAKES[mistake]
    pytester.makepyfile(source)
    result = pytester.runpytest_subprocess(*arguments, "-q")
    assert result.ret == 2
    assert len([line for line in result.outlines if told in line]) == 1
    assert "passed" not in result.stdout.str()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_workers_of_xdist_name_the_mistake_once(pytester: pytest.Pytester, mistake: str) -> None:
    source, arguments, told = MISTAKES[mistake]
    pytester.makepyfile(source)
    result = pytester.runpytest_subprocess(*arguments, "-n", "2", "-q", "--no-header", "-rN")
    assert result.ret != 0
    assert len([line for line in result.outlines if told in line]) == 1


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "under xdist"])
def test_wrong_scope_of_the_ray_cluster_is_named(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_subprocess("-q", "-o", "rlcanary_ray_scope=class", *workers)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.errlines == ["ERROR: rlcanary_ray_scope must be module or session, got 'class'", ""]


@pytest.mark.parametrize("plugin", ["faulthandler", "debugging"])
def test_session_does_without_a_plugin_of_pytests(pytester: pytest.Pytester, plugin: str) -> None:
    pytester.makepyfile("def test_it(): pass")
    assert pytester.runpytest_subprocess("-q", "-p", f"no:{plugin}").ret == 0
