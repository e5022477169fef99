"""The names under which tests appear in the results."""

from rlcanary.recording.keys import metric_key, plain_key, qualified_keys


def test_plain_test_goes_by_module_and_function() -> None:
    assert plain_key("tests/unit/test_policy.py::test_generation") == "test_policy::test_generation"


def test_class_and_parameters_are_part_of_the_key() -> None:
    assert plain_key("tests/test_a.py::TestA::test_f[x/y.py::z-0.5]") == "test_a::TestA::test_f[x/y.py::z-0.5]"


def test_tests_of_one_name_in_two_folders_go_by_their_node_ids() -> None:
    nodeids = ["a/test_x.py::test_f", "b/test_x.py::test_f", "b/test_x.py::test_g"]
    qualified = qualified_keys(nodeids)
    assert [metric_key(nodeid, qualified) for nodeid in nodeids] == [
        "a/test_x.py::test_f",
        "b/test_x.py::test_f",
        "test_x::test_g",
    ]
    assert qualified_keys(reversed(nodeids)) == qualified
